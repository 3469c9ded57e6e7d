"""Kill a run at every step of a unit, put an older catalog back, write other rows: none is lost in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from floodmark.testing.children import run_killed
from tests.conftest import Place
from tests.crash.sink_ends import End, NewEnd, ends
from tests.crash.sink_world import EVENTS, SINK, append, make, perform, ship
from tests.rolled_back import CatalogCopy

# Killed before the witness is in storage, nothing was sent: the older catalog goes on as if nothing had been.
BEFORE = frozenset({"unit.held", "unit.opened"})


@pytest.fixture
def new_end(tmp_path: Path) -> Iterator[NewEnd]:
    with ends(tmp_path) as make_end:
        yield make_end


def points() -> list[tuple[str, str]]:
    files = [("files", point) for point in ("held", "opened", "witnessed", "sealed", "sent", "manifest", "shipped")]
    others = [("http", "witnessed"), ("http", "sent"), ("iceberg", "committed"), ("lake", "sent"), ("lake", "settled")]
    return [(kind, f"unit.{step}") for kind, step in (*files, *others)]


def numbers(end: End) -> list[int]:
    return sorted(number for number, _ in end.contents().events.elements())


@pytest.mark.mostly_sqlite
@pytest.mark.whole
@pytest.mark.parametrize(("kind", "point"), points())
def test_a_unit_that_a_put_back_catalog_does_not_know_is_noticed_wherever_its_run_was_killed(
    place: Place, new_end: NewEnd, tmp_path: Path, kind: str, point: str
) -> None:
    end = new_end(kind)
    with place.open(create=True, actor="test") as lake:
        make(lake)
        lake.sinks.add(SINK, end.kind, tables=EVENTS, **end.settings)
        perform(lake, append(EVENTS, [1], "row"))
        assert lake.sinks.run(SINK).outcome == "shipped"
    copy = CatalogCopy(place, tmp_path / "copy")
    with place.open() as lake:
        perform(lake, append(EVENTS, [2], "row"))
    assert run_killed(ship, place, failpoint=point), f"{point} was never passed"
    copy.put_back()
    with place.open() as lake:
        perform(lake, append(EVENTS, [102], "row"))
        done = lake.sinks.run(SINK)
        if point in BEFORE:
            assert done.outcome == "shipped"
            assert numbers(end) == [1, 102]
            return
        assert (done.outcome, "rolled back" in str(done.error)) == ("refused", True)
        sent = numbers(end)
        assert sent in ([1], [1, 2])
        lake.sinks.replay(SINK, start="mark")
        assert lake.sinks.run(SINK, until_empty=True).outcome == "shipped"
    if kind != "files" or sent == [1]:
        assert numbers(end) == sorted([*sent, 102])
