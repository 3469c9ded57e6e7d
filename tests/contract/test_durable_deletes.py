"""What is deleted stays deleted through a power loss: unlink, sync the folder, and only then let the catalog forget.

A power loss cannot be had here, so the order of system calls is watched: at each COMMIT of the catalog no removed name
may be waiting for the sync of its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

import floodmark as fm
from floodmark.storage import Storage
from floodmark.storage.local import TEMPORARY_PREFIX
from floodmark.testing.children import run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, rows


class Watch:
    """Which folders lost a name since they were synced."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waiting: set[str] = set()
        self.unlinked = 0
        self.commits_with_waiting: list[set[str]] = []
        unlink, rmdir, fsync = os.unlink, os.rmdir, os.fsync

        def watched_unlink(path: Any, *args: Any, **options: Any) -> None:
            unlink(path, *args, **options)
            if not os.path.basename(path).startswith(TEMPORARY_PREFIX):
                self.waiting.add(os.path.dirname(path))
                self.unlinked += 1

        def watched_rmdir(path: Any, *args: Any, **options: Any) -> None:
            rmdir(path, *args, **options)
            if path in self.waiting:  # its names are gone for good once its own name is
                self.waiting.discard(path)
                self.waiting.add(os.path.dirname(path))

        def watched_fsync(fd: int) -> None:
            fsync(fd)
            self.waiting.discard(os.readlink(f"/proc/self/fd/{fd}"))

        patch.setattr(os, "unlink", watched_unlink)
        patch.setattr(os, "rmdir", watched_rmdir)
        patch.setattr(os, "fsync", watched_fsync)

    def on(self, lake: fm.Lake) -> None:
        def committing(_: Any) -> None:
            if self.waiting:
                self.commits_with_waiting.append(set(self.waiting))

        event.listen(lake.catalog.database.engine, "commit", committing)


@pytest.fixture
def watch() -> Iterator[Watch]:
    with pytest.MonkeyPatch.context() as patch:
        yield Watch(patch)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("a/one", "a/two", "b/c/three"):
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_text(name)
    return tmp_path / "files"


def test_a_deleted_file_is_durably_gone_when_delete_returns(watch: Watch, files: Path) -> None:
    Storage().delete(f"file://{files}/a/one")
    assert watch.unlinked == 1
    assert watch.waiting == set()


def test_many_deletes_sync_each_folder_once(watch: Watch, files: Path) -> None:
    storage = Storage()
    storage.delete_many([f"file://{files}/{name}" for name in ("a/one", "a/two", "b/c/three")])
    assert watch.unlinked == 3
    assert watch.waiting == set()
    assert storage.counters.calls["fsync_dir"] == 2


def test_a_deleted_folder_is_durably_gone(watch: Watch, files: Path) -> None:
    assert Storage().delete_prefix(f"file://{files}") == 3
    assert watch.waiting == set()


def test_a_file_that_a_killed_process_unlinked_is_synced_by_the_next_delete(files: Path) -> None:
    """It is absent, but nothing made that durable."""
    storage = Storage()
    os.unlink(files / "a" / "one")
    storage.delete(f"file://{files}/a/one")
    assert storage.counters.calls["fsync_dir"] == 1


def test_a_sweep_syncs_before_the_catalog_forgets(lake: fm.Lake, watch: Watch) -> None:
    for number in range(4):
        lake.append("events", rows(number))
    lake.overwrite("events", rows(9))
    lake.catalog.expiry.expire(before_ms=2**60)
    watch.on(lake)
    swept = lake.maintain.sweep(grace="0s")
    assert swept.outcome == "swept"
    assert watch.unlinked > 0
    assert watch.commits_with_waiting == []
    check_lake(lake.catalog)


def _sealed_append(place: Place) -> None:
    with place.open() as lake:
        lake.append("events", rows(1))


def test_recovery_syncs_before_the_catalog_forgets(place: Place, watch: Watch) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        assert run_killed(_sealed_append, place, failpoint="append.sealed")
        watch.on(lake)
        assert len(lake.recover().rolled_back) == 1
        assert watch.unlinked > 0
        assert watch.waiting == set()
        assert watch.commits_with_waiting == []


def test_cleaning_up_lost_attempts_syncs_before_the_catalog_forgets(lake: fm.Lake, place: Place, watch: Watch) -> None:
    with place.open() as other:
        watch.on(lake)
        with at("append.built", lambda: other.append("events", rows(1))):
            lake.append("events", rows(2))
        assert watch.unlinked > 0
        assert watch.commits_with_waiting == []
