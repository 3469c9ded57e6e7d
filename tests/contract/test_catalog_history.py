"""Versions, time travel, what holds a version, batch identities, and the catalog's backup and restore."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

import floodmark as fm
from floodmark import clock, failpoints
from floodmark.catalog import tables
from floodmark.commit.manifests import MERGE_AT
from floodmark.commit.metadata import METADATA_LOG_KEPT
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.testing.children import Child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows

FOREVER_MS = 2**60


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)


# ── versions and time ──


def test_every_version_is_read_as_it_was(lake: fm.Lake) -> None:
    first = lake.append("events", rows(1))
    second = lake.append("notes", rows(2))
    with lake.transaction("both", actor="someone") as tx:
        tx.append("events", rows(3))
        tx.append("notes", rows(4))
    assert tx.commit is not None
    assert [first.version, second.version, tx.commit.version] == [3, 4, 5]
    seen = {version: (ids(lake, "events", version), ids(lake, "notes", version)) for version in range(2, 6)}
    assert seen == {2: ([], []), 3: ([1], []), 4: ([1], [2]), 5: ([1, 3], [2, 4])}
    assert set(lake.catalog.history.tables_at(1)) == {"events"}
    newest = lake.history(limit=1)[0]
    assert (newest.kind, newest.actor, newest.message) == ("transaction", "someone", "both")
    assert [(one.table, one.rows_added, one.rows_total) for one in newest.tables] == [("events", 1, 2), ("notes", 1, 2)]
    assert [commit.version for commit in lake.history(table="notes")] == [5, 4, 2]
    with pytest.raises(fm.NotFound) as caught:
        ids(lake, version=6)
    assert caught.value.facts == {"version": 6, "newest": 5}


def test_a_moment_means_the_newest_version_up_to_then(lake: fm.Lake) -> None:
    commits = []
    for number in range(3):
        time.sleep(0.003)
        commits.append(lake.append("events", rows(number)))
    history = lake.catalog.history
    for before, commit in pairwise(commits):
        assert before.committed_ms < commit.committed_ms
        assert history.resolve(at_ms=commit.committed_ms) == commit.version
        assert history.resolve(at_ms=commit.committed_ms - 1) == before.version
    assert history.resolve(at_ms=commits[-1].committed_ms + 86_400_000) == commits[-1].version
    assert clock.parse_time_ms(clock.format_time(commits[0].committed_ms)) == commits[0].committed_ms
    with pytest.raises(fm.NotFound):
        history.resolve(at_ms=lake.history(limit=10)[-1].committed_ms - 1)
    with pytest.raises(fm.Invalid, match="not both"):
        lake.read("events", version=1, at="2026-01-01T00:00:00Z")
    with pytest.raises(fm.Invalid, match="invalid timestamp"):
        lake.read("events", at="yesterday")


def test_commit_times_never_go_back_although_the_clock_does(lake: fm.Lake) -> None:
    before = lake.append("events", rows(1))
    ahead_ms = before.committed_ms + 3_600_000
    with lake.catalog.database.write() as tx:
        tx.execute(
            update(tables.commits).where(tables.commits.c.version == before.version).values(committed_ms=ahead_ms)
        )
    after = lake.append("events", rows(2))
    assert after.committed_ms == ahead_ms
    assert lake.catalog.history.resolve(at_ms=ahead_ms) == after.version
    check_lake(lake.catalog)


# ── what holds a version, and what ends it ──


def test_an_expired_version_is_below_retention_and_the_head_stays(lake: fm.Lake) -> None:
    for number in range(3):
        lake.append("events", rows(number))
    expired = lake.catalog.expiry.expire(FOREVER_MS)
    assert expired == [1, 2, 3, 4]
    assert lake.catalog.expiry.expire(FOREVER_MS) == []
    for version in expired:
        with pytest.raises(fm.BelowRetention) as caught:
            ids(lake, version=version)
        assert caught.value.facts["version"] == version
    assert ids(lake) == ids(lake, version=5) == [0, 1, 2]
    with pytest.raises(fm.BelowRetention):
        lake.catalog.history.pin(4, holder="late", reason="too late")
    with pytest.raises(fm.NotFound):
        lake.catalog.history.pin(99, holder="early", reason="never was")
    check_lake(lake.catalog)


def test_only_versions_from_before_the_moment_expire(lake: fm.Lake) -> None:
    older = lake.append("events", rows(1))
    old = lake.append("events", rows(4))
    time.sleep(0.003)
    young = lake.append("events", rows(2))
    lake.append("events", rows(3))
    assert lake.catalog.expiry.expirable(young.committed_ms) == [1, 2, older.version]
    assert lake.catalog.expiry.expire(young.committed_ms) == [1, 2, older.version]
    assert ids(lake, version=young.version) == [1, 2, 4]
    # What the lake was when the window began can be read to its end.
    assert lake.catalog.history.resolve(at_ms=young.committed_ms - 1) == old.version
    assert lake.catalog.expiry.expire(young.committed_ms) == []
    with pytest.raises(fm.BelowRetention):
        lake.catalog.history.resolve(version=older.version)


def test_a_pinned_version_stays_until_it_is_let_go(lake: fm.Lake) -> None:
    pinned = lake.append("events", rows(1))
    pin = lake.catalog.history.pin(pinned.version, holder="reader", reason="a long read")
    lake.append("events", rows(2))
    assert lake.status()["pins"] == 1
    assert pinned.version not in lake.catalog.expiry.expire(FOREVER_MS)
    assert ids(lake, version=pinned.version) == [1]
    lake.catalog.history.unpin(pin)
    assert lake.status()["pins"] == 0
    assert lake.catalog.expiry.expire(FOREVER_MS) == [pinned.version]
    with pytest.raises(fm.BelowRetention):
        ids(lake, version=pinned.version)


def test_the_version_that_an_unfinished_operation_stands_on_stays(lake: fm.Lake) -> None:
    base = lake.append("events", rows(1)).version
    operation = lake.catalog.journal.begin("append", branch="main", actor="test", message="slow")
    lake.append("events", rows(2))
    since = lake.append("events", rows(3)).version - 1
    assert {base, since}.isdisjoint(lake.catalog.expiry.expire(FOREVER_MS))
    assert ids(lake, version=base) == [1]
    lake.catalog.journal.abandon(operation.id)
    lake.catalog.journal.mark_cleaned(operation.id)
    assert lake.catalog.expiry.expire(FOREVER_MS) == [base, since]


# ── hundreds of commits ──


def test_old_versions_are_read_after_hundreds_of_commits_and_metadata_stays_small(
    new_place: Callable[[str], Place],
) -> None:
    place = new_place("sqlite")
    prepare(place)
    commits = 300
    with place.open() as lake:
        for number in range(commits):
            lake.append("events", [{"id": number}])
    with place.open() as lake:
        for version in (2, 3, 40, 150, 301, 302):
            assert ids(lake, version=version) == list(range(version - 2))
        head = lake.heads()[0]
        metadata = lake.catalog.files.metadata(head.metadata_location)
        assert len(metadata.snapshots) <= SNAPSHOTS_KEPT + 1
        assert len(metadata.snapshot_log) <= SNAPSHOTS_KEPT + 1
        assert len(metadata.metadata_log) <= METADATA_LOG_KEPT
        assert metadata.current_snapshot_id == head.snapshot
        # A list has fewer than MERGE_AT manifests of each size class (1, 16 and 256 files) before each merge.
        lists = [lake.catalog.history.touched(version)[0].manifest_list for version in range(280, commits + 3)]
        assert max(len(lake.catalog.files.manifests(one)) for one in lists) <= 3 * MERGE_AT
        assert head.rows == head.files == commits
        lake.catalog.expiry.expire(FOREVER_MS)
        with pytest.raises(fm.BelowRetention):
            ids(lake, version=150)
        assert ids(lake) == list(range(commits))


# ── batches ──


def test_a_batch_comes_in_once_and_says_so(lake: fm.Lake) -> None:
    first = lake.append("events", rows(1), batch="monday")
    again = lake.append("events", rows(1), batch="monday")
    assert (first.outcome, again.outcome) == ("committed", "already_committed")
    assert again.version == first.version
    assert lake.status()["version"] == first.version
    assert ids(lake) == [1]
    check_lake(lake.catalog)


def test_batch_ids_of_tables_and_transactions_are_independent(lake: fm.Lake) -> None:
    assert lake.append("events", rows(1), batch="monday").outcome == "committed"
    assert lake.append("notes", rows(2), batch="monday").outcome == "committed"
    for expected in ("committed", "already_committed"):
        with lake.transaction(batch="monday") as tx:
            tx.append("events", rows(3))
        assert tx.commit is not None
        assert tx.commit.outcome == expected
    assert lake.append("events", rows(9), batch="Monday").outcome == "committed"
    assert (ids(lake), ids(lake, "notes")) == ([1, 3, 9], [2])
    check_lake(lake.catalog)


def test_a_batch_without_rows_is_recorded_too(lake: fm.Lake) -> None:
    assert lake.append("events", []).outcome == "nothing_to_do"
    assert lake.append("events", [], batch="empty").outcome == "committed"
    assert lake.append("events", rows(1), batch="empty").outcome == "already_committed"
    assert ids(lake) == []
    check_lake(lake.catalog)


def append_together(place: Place, mine: str, others: str) -> str:
    """Append a batch, and meet the other process between seal and publish."""

    def meet(name: str) -> None:
        if name == "append.sealed":
            Path(mine).touch()
            while not os.path.exists(others):
                time.sleep(0.002)

    failpoints.observer = meet
    with place.open() as lake:
        commit = lake.append("events", rows(1, 2), batch="monday")
        return f"{commit.outcome} {commit.version}"


def test_the_same_batch_from_two_processes_at_once_is_one_commit(place: Place, tmp_path: Path) -> None:
    prepare(place)
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    children = [Child(append_together, place, here, there), Child(append_together, place, there, here)]
    assert sorted(child.wait() for child in children) == ["already_committed 3", "committed 3"]
    with place.open() as lake:
        assert ids(lake) == [1, 2]
        facts = check_lake(lake.catalog)
        assert facts.audit == {}
        assert sorted(facts.operations.values()).count("abandoned") == 1


# ── backup and restore ──


def other_catalog(place: Place, new_place: Callable[[str], Place], database: str | None = None) -> Place:
    """The same lake's path with an empty database, of the same kind or of the one given."""
    database = database or ("postgresql" if place.catalog else "sqlite")
    fresh = new_place(database)
    if fresh.catalog is None:
        os.makedirs(fresh.path)
    return Place(place.path, fresh.catalog or f"sqlite:///{fresh.path}/other.db")


def write_pairs(place: Place, start: str, stop: str) -> str:
    number = 0
    with place.open() as lake:
        while not os.path.exists(stop):
            with lake.transaction() as tx:
                tx.append("events", rows(number))
                tx.append("notes", rows(number))
            number += 1
            Path(start).touch()
    return str(number)


def test_a_backup_beside_a_writer_is_one_consistent_view(
    place: Place, new_place: Callable[[str], Place], tmp_path: Path
) -> None:
    prepare(place)
    start, stop = tmp_path / "started", tmp_path / "stop"
    writer = Child(write_pairs, place, str(start), str(stop))
    while not start.exists():
        time.sleep(0.005)
    taken = []
    with place.open(read_only=True) as lake:
        while writer.process.is_alive() and len(taken) < 4:
            if not taken or lake.status()["version"] > taken[-1]["version"]:
                taken.append(lake.backup(tmp_path / f"backup{len(taken)}"))
    stop.touch()
    commits = int(writer.wait())
    versions = [backup["version"] for backup in taken]
    assert versions == sorted(set(versions))
    assert len(versions) == 4, "the other process ended early"

    for number in (0, len(taken) // 2):
        restored = other_catalog(place, new_place)
        fm.restore(tmp_path / f"backup{number}", restored.path, catalog=restored.catalog)
        with restored.open() as lake:
            assert lake.status()["version"] == versions[number]
            expected = list(range(versions[number] - 2))
            assert (ids(lake, "events"), ids(lake, "notes")) == (expected, expected)
            # Files of commits after the backup are there and not its own.
            check_lake(lake.catalog, settled=False)
            assert lake.status()["health"] == "fine"
    with place.open() as lake:
        assert ids(lake) == list(range(commits))
        check_lake(lake.catalog)


@pytest.mark.parametrize(
    ("source", "target"),
    [("sqlite", "sqlite"), ("sqlite", "postgresql"), ("postgresql", "sqlite"), ("postgresql", "postgresql")],
)
def test_a_restore_is_a_new_incarnation_of_the_same_lake_on_any_database(
    new_place: Callable[[str], Place], tmp_path: Path, source: str, target: str
) -> None:
    place = new_place(source)
    prepare(place)
    with place.open() as lake:
        lake.append("events", rows(1, 2), batch="monday", message="the first", actor="someone")
        lake.catalog.history.pin(3, holder="reader", reason="a long read")
        history, status, tables_before = lake.history(), lake.status(), lake.tables()
        taken = lake.backup(tmp_path / "lake.backup")
    restored = other_catalog(place, new_place, target)
    answer = fm.restore(tmp_path / "lake.backup", restored.path, catalog=restored.catalog)
    assert answer["missing"] == []
    assert answer["rows"] == taken["rows"]
    assert answer["incarnation"] != answer["backup_incarnation"] == status["incarnation"]
    with restored.open() as lake:
        found = lake.status()
        assert found["incarnation"] == answer["incarnation"]
        for name in ("version", "format", "lake", "tables", "rows", "pins", "health"):
            assert found[name] == status[name], name
        assert (lake.history(), lake.tables()) == (history, tables_before)
        assert (ids(lake), ids(lake, version=2)) == ([1, 2], [])
        assert lake.append("events", rows(1, 2), batch="monday").outcome == "already_committed"
        check_lake(lake.catalog)
        assert lake.append("events", rows(3)).version == 4
        assert ids(lake) == [1, 2, 3]
        check_lake(lake.catalog)


def append_batch(place: Place) -> None:
    with place.open() as lake:
        lake.append("events", rows(5), batch="unfinished")


def test_what_was_unfinished_at_the_backup_is_given_up_by_the_restore_and_its_files_are_kept(
    place: Place, new_place: Callable[[str], Place], tmp_path: Path
) -> None:
    prepare(place)
    assert run_killed(append_batch, place, failpoint="append.sealed")
    with place.open(read_only=True) as lake:
        lake.backup(tmp_path / "lake.backup")
        operation = lake.status()["pending"][0]
    with place.open() as lake:
        assert ids(lake) == [5]  # healed: published after the backup
    restored = other_catalog(place, new_place)
    fm.restore(tmp_path / "lake.backup", restored.path, catalog=restored.catalog)
    with restored.open() as lake:
        assert ids(lake) == []
        assert [(row.operation, row.outcome) for row in lake.audit()] == [(operation, "discarded")]
        assert lake.recover().outcome == "nothing_to_do"
        assert lake.resolve(operation) is None
    with place.open() as lake:
        assert ids(lake) == [5]
        check_lake(lake.catalog)


def test_a_restore_never_replaces_a_catalog_and_never_moves_a_lake(
    place: Place, new_place: Callable[[str], Place], tmp_path: Path
) -> None:
    prepare(place)
    with place.open() as lake:
        lake.backup(tmp_path / "lake.backup")
        lake.append("events", rows(1))
        status = lake.status()
    with pytest.raises(fm.Invalid, match="a catalog exists already"):
        fm.restore(tmp_path / "lake.backup", place.path, catalog=place.catalog)
    with place.open() as lake:
        assert lake.status() == status
    elsewhere = new_place("postgresql" if place.catalog else "sqlite")
    with pytest.raises(fm.Invalid, match="another location"):
        fm.restore(tmp_path / "lake.backup", elsewhere.path, catalog=elsewhere.catalog)
    with pytest.raises(fm.NotFound):
        elsewhere.open()
    with pytest.raises(fm.NotFound, match="no such backup"):
        fm.restore(tmp_path / "nothing", place.path, catalog=place.catalog)


def damaged_backups(whole: bytes) -> dict[str, bytes]:
    lines = whole.splitlines(keepends=True)
    header = json.loads(lines[0])

    def with_header(**changes: Any) -> bytes:
        return b"".join([json.dumps({**header, **changes}).encode() + b"\n", *lines[1:]])

    return {
        "empty": b"",
        "only a header": lines[0],
        "without its end": b"".join(lines[:-1]),
        "cut in the middle": whole[: len(whole) // 2],
        "cut in its last line": whole[:-30],
        "a row less": b"".join(lines[:5] + lines[6:]),
        "two rows exchanged": b"".join([*lines[:2], lines[3], lines[2], *lines[4:]]),
        "a row changed": whole.replace(b'"actor": "test"', b'"actor": "tess"', 1),
        "a header changed": with_header(version=99),
        "not a backup": b"id,name\n1,a\n2,b\n",
        "another JSON": b"[]\n[]\n",
    }


def test_a_torn_or_changed_backup_is_refused_and_makes_nothing(
    place: Place, new_place: Callable[[str], Place], tmp_path: Path
) -> None:
    prepare(place)
    file = tmp_path / "lake.backup"
    with place.open() as lake:
        lake.backup(file)
    target = other_catalog(place, new_place)
    damaged = damaged_backups(file.read_bytes())
    assert len({*damaged.values(), file.read_bytes()}) == len(damaged) + 1
    for name, content in damaged.items():
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(fm.Corrupt):
            fm.restore(tmp_path / "damaged", target.path, catalog=target.catalog)
        with pytest.raises(fm.Corrupt, match="but no catalog for them"):
            target.open()
        assert name
    fm.restore(file, target.path, catalog=target.catalog)
    with target.open() as lake:
        check_lake(lake.catalog)


def test_a_backup_of_a_newer_format_is_refused(place: Place, new_place: Callable[[str], Place], tmp_path: Path) -> None:
    prepare(place)
    with place.open() as lake:
        with lake.catalog.database.write() as tx:
            tx.execute(update(tables.lake).values(format=tables.FORMAT + 1))
        lake.backup(tmp_path / "newer.backup")
    target = other_catalog(place, new_place)
    with pytest.raises(fm.TooNew):
        fm.restore(tmp_path / "newer.backup", target.path, catalog=target.catalog)
    with pytest.raises(fm.Corrupt, match="but no catalog for them"):
        target.open()


def test_a_backup_is_whole_or_absent_and_replaces_an_older_one(lake: fm.Lake, tmp_path: Path) -> None:
    file = tmp_path / "lake.backup"
    first = lake.backup(file)
    lake.append("events", rows(1))
    second = lake.backup(file)
    assert second["version"] == first["version"] + 1
    assert json.loads(file.read_bytes().splitlines()[0])["version"] == second["version"]
    assert os.listdir(tmp_path).count("lake.backup") == 1
