"""Nobody waits for a column backfill: probed from another process, only while the job is live.

Others at work on the machine only add time, so a problem that one probe of a few does not find is noise; a version that
is bad on purpose must fail each time. On SQLite, where the threads that are watched do all of the catalog's work: how
long a database server waited for a core, nobody can tell apart. `python -m bench --only backfills` probes both.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.simulation.probe import HOLD_S_MAX, SLOWER_MAX, TABLE, Found, fill, fill_at_once, make_table, probe

FILES, FILE_ROWS = 20, 1_000
TRIES_MAX = 12


@pytest.fixture
def table(new_place: Callable[[str], Place]) -> Place:
    """A lake with a table of small files, so that a backfill has many batches."""
    place = new_place("sqlite")
    with place.open(create=True, actor="test") as lake:
        make_table(lake, FILES, FILE_ROWS)
    return place


def check_filled(place: Place, found: Found, column: str) -> None:
    """It was the job that was probed, and it did its work: no row of it was lost, every one has its value."""
    with place.open(read_only=True) as lake:
        job = lake.backfill.show(f"{TABLE}.{column}")
        rows = lake.read_arrow(TABLE).read_all()
        check_lake(lake.catalog)
    assert (job["status"], job["rows"], job["unfilled"]) == ("done", job["total"], 0)
    assert found.live_for_s > 0
    assert rows[column].to_pylist() == rows["name"].to_pylist()
    assert len(rows) > FILES * FILE_ROWS


def test_status_and_merges_of_others_do_not_wait_for_a_live_backfill(table: Place) -> None:
    tried: list[list[str]] = []
    for number in range(TRIES_MAX):
        found = probe(table, fill, f"copy_{number}", batch_rows=FILE_ROWS)
        check_filled(table, found, f"copy_{number}")
        # Not a matter of noise.
        assert found.errors == []
        tried.append(found.problems)
        # What is wrong with the job is wrong each time; noise is now here, now there.
        if not set.intersection(*({problem.split(":")[0] for problem in problems} for problems in tried)):
            return
    pytest.fail("\n".join(f"probe {number}: {'; '.join(problems)}" for number, problems in enumerate(tried, 1)))


def test_a_rewrite_in_one_transaction_fails_the_same_probe(table: Place) -> None:
    for number in range(2):
        found = probe(table, fill_at_once, f"copy_{number}", rounds=20)
        check_filled(table, found, f"copy_{number}")
        assert found.hold_s_max > HOLD_S_MAX
        assert found.calls["merge"].slower > SLOWER_MAX
        assert {"hold", "merge"} <= {problem.split(":")[0] for problem in found.problems}
