"""Maintenance with faults: whichever call fails, no row is lost and the next run ends what is left."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import WRITES as WRITES_OF_STORAGE
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from floodmark.testing.postgres import PostgresServer
from tests.conftest import EVENTS, Place, ids
from tests.contract.test_lost_replies import FAULTS_PER_LAKE, Faults, at_point

OLD, YOUNG = "2020-01-01T00:00:00", "2999-01-01T00:00:00"
KEPT = "id long not null, name string, at timestamp_ntz"


def kept_row(number: int, at: str = YOUNG) -> dict[str, Any]:
    return {"id": number, "name": f"row {number}", "at": datetime.fromisoformat(at)}


def prepare_kept(place: Place) -> None:
    """A table with a policy, and more versions than its metadata names."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("kept", KEPT, key=["id"])
        lake.maintain.set_policy("kept", "1y")
        for number in range(6):
            lake.append("kept", [kept_row(number)])
        lake.delete("kept", "id = 5")


def kept_ids(lake: fm.Lake) -> list[int]:
    return sorted(row["id"] for row in lake.read_arrow("kept").read_all().to_pylist())


def files_of(lake: fm.Lake) -> set[str]:
    root = Path(lake.location.removeprefix("file://"))
    return {str(path) for path in root.rglob("*") if path.is_file() and not path.name.startswith("catalog.db")}


UPKEEP: dict[str, Callable[[fm.Lake], Any]] = {
    "compact": lambda lake: lake.maintain.compact("kept", files_min=2),
    "retain": lambda lake: lake.maintain.retain("kept"),
}


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("kind", UPKEEP)
def test_a_lost_reply_to_the_commit_of_maintenance_is_resolved_by_asking(place: Place, kind: str, mode: str) -> None:
    prepare_kept(place)
    with place.open() as lake:
        lake.append("kept", [kept_row(100, OLD)])
        version, before = lake.status()["version"], files_of(lake)
        faults: list[DatabaseFaults] = []
        lose = at_point(
            f"{kind}.moved",
            lambda: faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode=mode)),
        )
        with lose:
            (record,) = UPKEEP[kind](lake).records
        assert faults[0].fired
        assert record.outcome == {"compact": "compacted", "retain": "retained"}[kind], record.as_dict()
        assert before <= files_of(lake), "nothing of the older versions is deleted"
        assert kept_ids(lake) == ([0, 1, 2, 3, 4] if kind == "retain" else [0, 1, 2, 3, 4, 100])
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert (facts.version, facts.audit) == (version + 1, {})


@pytest.mark.parametrize(("database", "mode"), [("sqlite", "before"), ("sqlite", "after"), ("postgresql", "after")])
def test_maintenance_whose_outcome_cannot_be_told_deletes_nothing(
    new_place: Callable[[str], Place], database: str, mode: str
) -> None:
    place = new_place(database)
    prepare_kept(place)
    with place.open() as lake:
        faults: list[DatabaseFaults] = []
        files: list[set[str]] = []

        def lose() -> None:
            files.append(files_of(lake))
            faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode=mode, stay_broken=True))

        with at_point("compact.moved", lose):
            (record,) = lake.maintain.compact("kept", files_min=2).records
        assert (record.outcome, record.detail["error"]) == ("failed", "CommitUnknown"), record.as_dict()
        assert "unrecorded" in record.detail
        assert files_of(lake) == files[0], "neither the old files nor the new ones are deleted"
        faults[0].remove()
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == (["rolled_back"] if mode == "before" else [])
        assert lake.catalog.history.head("kept").files == (1 if mode == "after" else 5)
        assert kept_ids(lake) == [0, 1, 2, 3, 4]
        assert lake.maintain.run(files_min=2, keep="0s", grace="0s").exit_code == 0
        assert lake.maintain.sweep(grace="0s", deep=True).outcome == "nothing_to_do"
        check_lake(lake.catalog)
        assert kept_ids(lake) == [0, 1, 2, 3, 4]


class UpkeepTrial:
    """One fault after another in a whole run of maintenance; afterwards rows and files are exactly what they should."""

    def __init__(self, new: Callable[[], Place]) -> None:
        self._new = new
        self._used = FAULTS_PER_LAKE
        self.failed = 0

    def open(self, number: int, **options: Any) -> fm.Lake:
        """The lake to try the next fault on: with something to retain, to compact, to expire and to sweep."""
        if self._used == FAULTS_PER_LAKE:
            self._place, self._used, self._young = self._new(), 0, [0, 1, 2, 3, 4]
            prepare_kept(self._place)
        self._used += 1
        lake = self._place.open(**options)
        lake.append("kept", [kept_row(1000 + number), kept_row(100_000 + number, OLD)])
        lake.delete("kept", f"id = {self._young.pop()}")
        self._young.append(1000 + number)
        return lake

    def run(self, lake: fm.Lake) -> None:
        try:
            done = lake.maintain.run(files_min=2, keep="0s", grace="0s")
            self.failed += any(record.outcome in ("failed", "conflict") for record in done.records)
            assert (done.exit_code == 0) == (done.outcome not in ("failed", "partial", "conflict", "refused"))
        except fm.FloodmarkError:
            self.failed += 1

    def check(self, number: int, *, whole: bool) -> None:
        """Healed and swept: the rows are exact, and so are the files; with `whole`, a run without faults ends it."""
        with self._place.open() as lake:
            found = kept_ids(lake)
            assert [one for one in found if one < 100_000] == sorted(self._young), f"after fault {number}"
            assert set(found) - set(self._young) <= {100_000 + one for one in range(number + 1)}
            done = lake.maintain.sweep(grace="0s")
            assert done.exit_code == 0, done.as_dict()
            facts = check_lake(lake.catalog)
            assert set(facts.audit.values()) <= {"rolled_back"}
            if whole:
                done = lake.maintain.run(files_min=2, keep="0s", grace="0s")
                assert done.exit_code == 0, done.as_dict()
                assert kept_ids(lake) == sorted(self._young)
                deep = lake.maintain.sweep(grace="0s", deep=True)
                assert deep.outcome == "nothing_to_do", deep.as_dict()
                assert lake.status()["health"] == "fine"


# The first call that fails, and how far it is to the next one; `-m soak` fails every one of them.
DATABASE_UPKEEP = [("sqlite", "before", 1, 5), ("sqlite", "after", 2, 4), ("postgresql", "after", 1, 12)]


@pytest.mark.parametrize(("database", "mode", "first", "step"), DATABASE_UPKEEP)
def test_whichever_database_call_of_maintenance_fails_nothing_is_lost(
    new_place: Callable[[str], Place], database: str, mode: str, first: int, step: int
) -> None:
    fail_database_calls(lambda: new_place(database), mode, first, step)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["before", "after"])
def test_soak_every_database_call_of_maintenance(place: Place, new_place: Callable[[str], Place], mode: str) -> None:
    fail_database_calls(lambda: new_place("sqlite" if place.catalog is None else "postgresql"), mode, 1, 1)


def fail_database_calls(new: Callable[[], Place], mode: str, number: int, step: int) -> None:
    trial = UpkeepTrial(new)
    fired, last = True, 0
    while fired:
        lake = trial.open(number)
        faults = Faults(lake, number, mode=mode)
        trial.run(lake)
        fired = faults.fired
        faults.mend()
        lake.close()
        trial.check(number, whole=not fired or number - last >= 8)
        last = number if number - last >= 8 else last
        number += step
    assert number > 60, "hardly any call was counted"
    assert trial.failed > 5


@pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full", "gone for good"])
def test_whichever_storage_call_of_maintenance_fails_nothing_is_lost(
    new_place: Callable[[str], Place], mode: str
) -> None:
    trial = UpkeepTrial(lambda: new_place("sqlite"))
    stay_broken = mode == "gone for good"
    # A write that is torn is unlike one that never was; other calls are not.
    verbs = WRITES_OF_STORAGE if mode == "torn" else None
    fired, number = True, 0
    while fired:
        number += 2 if stay_broken else 1
        storage = FaultyStorage(mode="before" if stay_broken else mode, stay_broken=stay_broken, verbs=verbs)
        lake = trial.open(number, storage=storage)
        storage.fail_at = storage.calls_seen + number
        trial.run(lake)
        fired = storage.fired
        storage.stay_broken, storage.fail_at = False, None
        lake.close()
        trial.check(number, whole=not fired or number % 8 == 0)
    assert number > 5, "hardly any call was counted"
    assert trial.failed > 2


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """A disk of its own at `folder`, if this user may mount one; tells whether it is there."""
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], capture_output=True
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def test_a_full_disk_in_the_middle_of_a_rewrite_leaves_the_old_files(tmp_path: Path, postgres: PostgresServer) -> None:
    """The catalog is on another disk. Where no small disk can be mounted, a fault of the storage fills it."""
    with small_disk(tmp_path / "disk", 4 * 1024 * 1024) as mounted:
        storage = FaultyStorage(mode="disk_full")
        place = Place(str(tmp_path / "disk" / "lake"), postgres.url(postgres.new_database()))
        with place.open(create=True, storage=storage) as lake:
            lake.create_table("events", EVENTS)
            dice = random.Random(1)
            for start in range(0, 12, 4):
                large = [{"id": number, "name": dice.randbytes(80_000).hex()} for number in range(start, start + 4)]
                lake.append("events", large)
            filler = tmp_path / "disk" / "filler"
            if mounted:
                # Some room for the journal's own files and for the first pages, not for the rows.
                free = os.statvfs(filler.parent).f_bavail * os.statvfs(filler.parent).f_frsize
                filler.write_bytes(b"\0" * (free - 100_000))
            else:
                storage.fail_at = storage.calls_seen + 1
            before, version = files_of(lake), lake.status()["version"]
            (record,) = lake.maintain.compact("events", files_min=2).records
            assert record.outcome == "failed", record.as_dict()
            assert record.detail["error"] == "Unavailable", record.as_dict()
            assert record.detail["exit_code"] == 4
            assert ids(lake) == list(range(12)), "the old files serve on"
            assert (lake.status()["version"], files_of(lake)) == (version, before), "what was staged is gone at once"
            filler.unlink(missing_ok=True)
            storage.fail_at = None
            assert lake.maintain.compact("events", files_min=2).outcome == "compacted"
            assert ids(lake) == list(range(12))
            check_lake(lake.catalog)
