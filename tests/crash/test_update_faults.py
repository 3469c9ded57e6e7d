"""Let the calls of an update fail in turn: an error means that no row changed, and the same update does all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import floodmark as fm
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.crash.faults import fail_statements, fail_storage

pytestmark = pytest.mark.mostly_sqlite


class Trial:
    """One lake, round after round: the rows of one file get a newer value, and the calls meet a fault."""

    def __init__(self, place: Place, batch: bool) -> None:
        self.lake = place.open(create=True, actor="test", storage=FaultyStorage())
        self.lake.create_table("people", "id long not null, round int", key=["id"])
        for number in range(2):
            self.lake.append("people", [{"id": 2 * number + one, "round": 0} for one in range(2)])
        self.number = 0
        self._batch = batch

    def act(self) -> fm.Commit:
        batch = f"round {self.number + 1}" if self._batch else None
        return self.lake.update("people", {"round": str(self.number + 1)}, "id < 1 or id = 3", batch=batch)

    def rounds(self) -> dict[int, tuple[int, int]]:
        rows = self.lake.read_arrow("people", with_seq=True).read_all().to_pylist()
        return {row["id"]: (row["round"], row["_seq"]) for row in rows}

    def finish(self, outcome: str) -> None:
        found, done = self.rounds(), outcome == "committed"
        assert {found[one][0] for one in (0, 3)} == {self.number + done}, outcome
        again = self.act().outcome
        assert again == ("committed" if not done else "already_committed" if self._batch else "nothing_to_do")
        self.number += 1
        found = self.rounds()
        assert {found[one] for one in (0, 3)} == {(self.number, self.number + 2)}
        assert (found[1], found[2]) == ((0, 1), (0, 2))
        check_lake(self.lake.catalog)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full"])
def test_whichever_call_to_storage_fails_an_update_is_undone(
    new_place: Callable[[str], Place], mode: str, batch: bool
) -> None:
    outcomes = fail_storage(Trial(new_place("sqlite"), batch), mode)
    assert "raised" in outcomes
    assert len(outcomes) > 4, "hardly any call was counted"


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_statement_fails_an_update_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str, batch: bool
) -> None:
    assert len(fail_statements(Trial(new_place("sqlite"), batch), mode)) > 10, "hardly any statement was counted"
