"""Acknowledged bytes that cannot be read: refused, shown, gone on without on an operator's word; neighbours are fed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.ingest.intake import IntakeLimits
from floodmark.report.spools import read_spools
from floodmark.spool.accept import MEND, NOTHING, accept, plan
from floodmark.testing.invariants import check_lake
from tests.conftest import ids
from tests.intake_world import QUICK, SLOW, bring, folder_of, intake_of, state_of, table_id, take

pytestmark = pytest.mark.mostly_sqlite
# Two records in each segment, with or without a mark between them.
SMALL = IntakeLimits(group_wait_ms=3_600_000, segment_bytes=480)
FED, SENT = 3, 9


def row(number: int) -> dict[str, object]:
    return {"id": number, "name": f"name {number}; ".ljust(100, "x")}


@pytest.fixture
def folder(lake: fm.Lake) -> Path:
    """A spool with records 0 to 8, each with a key; the first three are fed."""
    with intake_of(lake, IntakeLimits(group_wait_ms=20, segment_bytes=480)) as intake:
        for number in range(FED):
            bring(lake, intake, "events", row(number), key=str(number))
    with intake_of(lake, SMALL) as intake:
        for number in range(FED, SENT):
            take(lake, intake, "events", row(number), key=str(number))
    folder = folder_of(lake) / table_id(lake, "events")
    assert [int(path.stem) for path in sorted(folder.glob("*.segment"))] == [2, 4, 6, 8]
    return folder


def segment(folder: Path, first: int) -> Path:
    return folder / f"{first:020d}.segment"


def payload(number: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path, text = segment(folder, number - number % 2), b"name %d" % number
        assert path.read_bytes().count(text) == 1
        path.write_bytes(path.read_bytes().replace(text, b"NAME %d" % number))

    return damage


def flip(name: str, offset: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[offset] ^= 1
        (folder / name).write_bytes(data)

    return damage


def header(folder: Path) -> None:
    flip(segment(folder, 4).name, 20)(folder)


def head(folder: Path) -> None:
    flip(segment(folder, 4).name, 90)(folder)


def keys(folder: Path) -> None:
    flip("keys", 60)(folder)


def gone(first: int) -> Callable[[Path], None]:
    return lambda folder: segment(folder, first).unlink()


NOBODY = "nothing"
# What is damaged, records that are lost, keys of fed records that are forgotten, and what is said of them.
CASES = {
    "payload": (payload(5), {5}, set(), "record 5: 1 row ", NOBODY),
    "payload_of_the_last_segment": (payload(8), {8}, set(), "record 8: 1 row ", NOBODY),
    "payload_of_a_fed_record": (payload(2), set(), set(), NOBODY, NOBODY),
    "head": (head, {4}, set(), "record 4: 1 row ", NOBODY),
    "header": (header, set(), set(), NOBODY, NOBODY),
    "keys": (keys, set(), {0, 1}, NOBODY, "before record 2"),
    "segment": (gone(6), {6, 7}, set(), "records 6 to 7: 2 rows ", NOBODY),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_damaged_is_gone_on_without_and_its_neighbours_are_fed(lake: fm.Lake, folder: Path, case: str) -> None:
    damage, lost, forgotten, told_lost, told_twice = CASES[case]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    with intake_of(lake, QUICK) as intake:
        assert state_of(intake, "events")["state"] == "refused"
    [seen] = read_spools(lake.catalog, thorough=True)
    assert seen.error is not None
    assert (seen.state, seen.error["kind"]) == ("refused", "Corrupt")

    planned = plan(lake.catalog, "events", None)
    assert planned.action == MEND
    assert told_lost in planned.lost
    assert told_twice in planned.twice
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"} == {
        name: data for name, data in after.items() if name != "lock"
    }
    accept(lake.catalog, planned)
    assert plan(lake.catalog, "events", None).action == NOTHING
    aside = {path.name.partition(".damaged-")[0]: path.read_bytes() for path in folder.glob("*.damaged-*")}
    assert {name: after[name] for name in aside} == aside
    assert {name for name in before if before[name] != after.get(name, before[name])} <= set(aside)

    with intake_of(lake, SLOW) as intake:
        again = {n for n in range(SENT) if take(lake, intake, "events", row(n), key=str(n)).outcome == "taken"}
        assert again == lost | forgotten  # what was lost may be sent again; what is in the table may not
        assert intake.drain(20)
        assert state_of(intake, "events")["error"] is None
    assert ids(lake) == sorted([*range(SENT), *forgotten])
    check_lake(lake.catalog)


def test_a_first_segment_that_is_gone_is_missed_and_the_others_are_fed(lake: fm.Lake, folder: Path) -> None:
    gone(2)(folder)
    for action in ("go_on", MEND):
        planned = plan(lake.catalog, "events", None)
        assert planned.action == action
        accept(lake.catalog, planned)
    with intake_of(lake, SLOW) as intake:
        assert intake.drain(20)
    assert ids(lake) == [0, 1, 2, *range(4, SENT)]


def test_a_damage_that_is_another_by_now_is_not_mended(lake: fm.Lake, folder: Path) -> None:
    payload(5)(folder)
    planned = plan(lake.catalog, "events", None)
    payload(6)(folder)
    with pytest.raises(fm.Conflict, match="not as it was"):
        accept(lake.catalog, planned)
    assert not list(folder.glob("*.damaged-*"))
