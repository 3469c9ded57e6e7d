"""The examples, as a user runs them: a process of their own, a new folder, and what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import ids

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: str, **changes: str) -> list[str]:
    """What the example printed, a line each."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), folder],
        cwd=Path(folder).parent,
        # A session of this process must not be taken for the example's own.
        env={k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))} | changes,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_the_quickstart_does_what_it_says(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    lines = run("quickstart.py", folder)
    assert lines[:2] == ["committed", "already_committed"]
    assert "3 transaction first import 2" in lines
    # The head has both orders, the first version one of them.
    assert [line.split("|")[2].strip() for line in lines if "|" in line and "Ada" in line] == ["12.75", "9.50"]
    with fm.open(folder, read_only=True) as lake:
        check_lake(lake.catalog)
        assert (ids(lake, "orders"), ids(lake, "customers")) == ([10, 11], [1])
        kinds = ["create_table", "create_table", "transaction", "append", "merge", "delete"]
        assert [commit.kind for commit in lake.history()] == kinds[::-1]


def test_a_follower_of_keyed_changes_has_what_the_table_has_without_java(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    lines = run("keyed_changes.py", folder, JAVA_HOME="", PATH=str(tmp_path / "empty"))
    told = [line.split() for line in lines if line.startswith("  ")]
    assert [line[:2] for line in told[:3]] == [["upsert", "1"], ["upsert", "2"], ["upsert", "3"]]
    assert sorted(told[3:5]) == [["upsert", "2", "at", "2"], ["upsert", "4", "at", "2"]]
    assert sorted(told[5:]) == [["delete", "4", "at", "3"], ["upsert", "3", "at", "4"]]
    assert lines[-2:] == ["nothing happened:", "the copy has the 3 rows of the table, up to sequence 4"]
    with fm.open(folder, read_only=True) as lake:
        check_lake(lake.catalog)
        assert ids(lake, "users") == [1, 2, 3]


def test_maintenance_leaves_few_files_and_the_rows_that_the_policy_keeps_without_java(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    lines = run("maintain.py", folder, JAVA_HOME="", PATH=str(tmp_path / "empty"))
    assert lines[:4] == [
        "40 small files of 40; due: compact readings: 40 small files",
        "compacted: 40 files into 1",
        "nothing_to_do",
        "retained: 30 rows older than 30 days",
    ]
    assert lines[4] == "43 snapshots can be read"
    assert lines[5].startswith("1 can be read, ")
    assert lines[6:] == ["swept", "0 orphan files; health: fine"]
    with fm.open(folder, read_only=True) as lake:
        check_lake(lake.catalog)
        (head,) = lake.heads()
        assert (head.rows, head.files) == (90, 1)


def test_a_follower_of_a_sink_has_the_rows_that_pass_its_filter_without_java(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    assert run("sinks.py", folder, JAVA_HOME="", PATH=str(tmp_path / "empty")) == [
        "shipped: 6 rows",
        "1 unit taken: [1, 3, 5]",
        "nothing_to_do",
        "3 changes behind",
        "shipped: 3 rows, 2 of them deletions",
        "1 unit taken: [5, 8]",
        "the copy has the rows that the table has",
    ]
    with fm.open(folder, read_only=True) as lake:
        check_lake(lake.catalog)
        (table,) = lake.sinks.about("dutch")["tables"]
    assert (table["mark"], table["head"], table["units"], table["open_unit"]) == (3, 3, 2, None)


def test_a_backfill_that_failed_goes_on_and_a_new_column_is_filled_without_java(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    lines = run("backfill.py", folder, JAVA_HOME="", PATH=str(tmp_path / "empty"))
    assert lines[:7] == [
        *(f"  {done} of 7" for done in range(5)),
        "failed: the archive is closed at night",
        "not all of it is loaded: 2024-01-01..2024-01-02",
    ]
    assert lines[7:14] == [
        *(f"  {done} of 7" for done in range(4, 8)),
        "done: 168 rows, the source was asked 8 times",
        "nothing_to_do",
        "loaded [['2024-01-01', '2024-01-08']]",
    ]
    steps = [int(line.split()[0]) for line in lines[14:] if line.endswith(" of 168")]
    assert (steps[0], steps[-1], len(steps) >= 4, steps == sorted(set(steps))) == (0, 168, True, True)
    assert lines[-2:] == ["done: 168 rows filled", "all 169 rows have it; health: fine"]
    with fm.open(folder, read_only=True) as lake:
        check_lake(lake.catalog)
        assert [job["status"] for job in lake.backfill.list()] == ["done", "done"]


def test_a_change_of_shape_is_a_plan_and_one_version_without_java(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    assert run("schema.py", folder, JAVA_HOME="", PATH=str(tmp_path / "empty")) == [
        "committed",
        "nothing_to_do",
        "refused: rows refer to keys that do not exist",
        "  customers: rename_column (safe)",
        "  customers: add_column (needs_rewrite)",
        "  orders: add_key (safe)",
        "  orders: change_sort (safe)",
        "committed: 2 tables in one version",
        "[{'id': 1, 'name': 'Ada', 'land': 'UK', 'vip': False}]",
        "[{'id': 1, 'name': 'Ada', 'country': 'UK'}]",
        "stale: the lake changed since the plan was created",
    ]
    with fm.open(folder, read_only=True) as lake:
        check_lake(lake.catalog)
        assert [commit.kind for commit in lake.history()] == ["apply", "append", "append", "apply"]


def test_every_example_is_run_by_a_test() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["backfill.py", "keyed_changes.py", "maintain.py", "quickstart.py", "schema.py", "sinks.py"]
