"""Kill a process that gives up versions which cannot be read: they are given up, once, with one audit row."""

from __future__ import annotations

import pytest

import floodmark as fm
from floodmark.testing.children import run_child, run_killed
from tests.conftest import EVENTS, Place, ids, rows


def prepare(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.overwrite("events", rows(1))
        lake.overwrite("events", rows(2))
        (gone,) = lake.catalog.files.data_files(lake.catalog.history.tables_at(2)["events"])
        lake.catalog.storage.delete(gone)


def give_up(place: Place) -> str:
    with place.open() as lake:
        return lake.give_up_unreadable(apply=True).outcome


@pytest.mark.mostly_sqlite
def test_versions_given_up_by_a_killed_process_are_given_up_once(place: Place) -> None:
    run_child(prepare, place)
    assert run_killed(give_up, place, failpoint="give_up.marked")
    for _ in range(2):
        with place.open() as lake:
            assert [row.outcome for row in lake.audit()] == ["given_up"]
            assert ids(lake) == [2]
            with pytest.raises(fm.BelowRetention):
                ids(lake, version=2)
        assert give_up(place) == "nothing_to_do"
