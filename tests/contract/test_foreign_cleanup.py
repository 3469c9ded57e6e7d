"""Another engine's clean-up: switched off by `gc.enabled`, and noticed where it happened all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

import floodmark as fm
from floodmark.commit.metadata import GC_BEFORE, GC_ENABLED
from floodmark.repair.examine import Check, examine_lake
from floodmark.repair.history_files import look_at_history
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.foreign_writer import by_another


def properties(lake: fm.Lake, table: str = "events") -> dict[str, str]:
    metadata = lake.catalog.files.metadata(lake.show(table)["metadata_location"])
    return dict(metadata.properties)


def set_there(place: Place, **changed: str) -> None:
    by_another(place, "events", lambda table: table.transaction().set_properties(changed).commit_transaction())


def local(location: str) -> Path:
    return Path(location.removeprefix("file://"))


# ── the switch ──


def test_every_new_table_has_gc_switched_off(lake: fm.Lake) -> None:
    assert properties(lake)[GC_ENABLED] == "false"
    lake.append("events", rows(1))
    assert properties(lake)[GC_ENABLED] == "false"


def foreign_table(folder: Path, **set_there: str) -> str:
    folder.mkdir()
    catalog = SqlCatalog("other", uri=f"sqlite:///{folder}/other.db", warehouse=f"file://{folder}")
    catalog.create_namespace("default")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    table = catalog.create_table("default.old", schema, properties=set_there)
    table.append(pa.table({"id": [1, 2]}, schema=schema))
    catalog.engine.dispose()
    return str(table.metadata_location)


@pytest.mark.mostly_sqlite
def test_an_adopted_table_gets_it_and_what_it_had_is_remembered(lake: fm.Lake, tmp_path: Path) -> None:
    location = foreign_table(tmp_path / "with", **{GC_ENABLED: "true"})
    before = local(location).read_bytes()
    lake.adopt("old", location)
    lake.adopt("plain", foreign_table(tmp_path / "without"))
    assert properties(lake, "old") | {GC_ENABLED: "false", GC_BEFORE: "true"} == properties(lake, "old")
    assert (properties(lake, "plain")[GC_ENABLED], properties(lake, "plain")[GC_BEFORE]) == ("false", "")
    lake.append("old", [{"id": 3}])
    assert properties(lake, "old")[GC_BEFORE] == "true"
    # The table in its own catalog has what it had: its metadata is never touched.
    assert local(location).read_bytes() == before


@pytest.mark.mostly_sqlite
def test_a_table_of_before_this_rule_gets_it_with_its_next_commit(place: Place, lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    location = lake.show("events")["metadata_location"]
    older = json.loads(local(location).read_text())
    for name in (GC_ENABLED, GC_BEFORE):
        del older["properties"][name]
    local(location).write_text(json.dumps(older))
    with place.open() as again:
        assert GC_ENABLED not in properties(again)
        again.append("events", rows(2))
        assert properties(again)[GC_ENABLED] == "false"


@pytest.mark.mostly_sqlite
def test_a_destination_of_a_sink_keeps_its_own_clean_up(lake: fm.Lake, tmp_path: Path) -> None:
    there = {"type": "sql", "uri": f"sqlite:///{tmp_path}/there.db", "warehouse": f"file://{tmp_path}/there"}
    lake.append("events", rows(1, 2))
    lake.sinks.add("out", "iceberg", tables="events", catalog=there)
    lake.sinks.run("out")
    catalog = SqlCatalog("default", **there)
    shipped = catalog.load_table("default.events")
    assert shipped.scan().count() == 2
    assert {GC_ENABLED, GC_BEFORE}.isdisjoint(shipped.properties)
    catalog.engine.dispose()


def test_setting_it_back_is_refused(lake: fm.Lake, tmp_path: Path) -> None:
    with pytest.raises(fm.Invalid, match="must not clean up") as caught:
        lake.create_table("mine", EVENTS, properties={GC_ENABLED: "true"})
    assert "floodmark maintain" in caught.value.advice
    with pytest.raises(fm.Invalid):
        lake.create_table("mine", EVENTS, properties={GC_BEFORE: "true"})
    lake.create_table("mine", EVENTS, properties={GC_ENABLED: "false"})
    declared = tmp_path / "schema.toml"
    declared.write_text('[tables.other]\ncolumns = { id = "long" }\nproperties = { "gc.enabled" = "true" }\n')
    with pytest.raises(fm.Invalid):
        lake.apply(str(declared))


def test_a_foreign_commit_that_sets_it_back_is_reported_and_put_back(place: Place, lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    by_another(
        place, "events", lambda table: table.transaction().set_properties({GC_ENABLED: "true"}).commit_transaction()
    )
    (planned,) = lake.repair()
    assert (planned.happened, planned.choice) == ("changed", "revert")
    assert "gc.enabled" in planned.detail
    assert "gc.enabled" in failed(lake)["table events"]
    lake.repair(apply=True)
    assert properties(lake)[GC_ENABLED] == "false"


# ── files of versions ──


def failed(lake: fm.Lake, *, deep: bool = False) -> dict[str, str]:
    return {check.name: check.detail for check in examine_lake(lake.catalog, deep=deep) if not check.passed}


def versions_check(lake: fm.Lake, *, deep: bool = False) -> Check:
    return next(check for check in examine_lake(lake.catalog, deep=deep) if check.name == "versions")


def data_files(lake: fm.Lake, version: int, table: str = "events") -> list[Path]:
    head = lake.catalog.history.tables_at(version)[table]
    return [local(path) for path in lake.catalog.files.data_files(head)]


@pytest.fixture
def history(place: Place) -> Iterator[fm.Lake]:
    """Versions 2 to 4 have files of their own, which the newest, 5, does not need."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        for number in (1, 2, 3, 4):
            lake.overwrite("events", rows(number))
        yield lake


def test_doctor_finds_a_missing_file_of_an_older_version_and_names_the_version(history: fm.Lake, place: Place) -> None:
    assert failed(history) == {}
    (gone,) = data_files(history, 3)
    gone.unlink()
    found = failed(history)
    assert list(found) == ["versions"]
    assert "version(s) 3 cannot be read" in found["versions"]
    assert gone.name in found["versions"]
    assert "--give-up" in found["versions"]


@pytest.mark.mostly_sqlite
def test_doctor_finds_files_that_are_shorter_than_they_were(history: fm.Lake) -> None:
    (older,), (newest,) = data_files(history, 4), data_files(history, 5)
    for path in (older, newest):
        path.write_bytes(path.read_bytes()[:-3])
    found = failed(history)
    assert set(found) == {"versions", "table events"}
    assert "bytes instead of" in found["versions"]
    assert "bytes instead of" in found["table events"]


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("deep", [False, True])
def test_doctor_does_not_say_that_all_can_be_read_if_only_the_newest_cannot(history: fm.Lake, deep: bool) -> None:
    assert versions_check(history, deep=deep).passed
    (newest,) = data_files(history, 5)
    newest.write_bytes(newest.read_bytes()[:-3])
    found = failed(history, deep=deep)
    assert set(found) == {"versions", "table events"}
    assert "the newest state of events cannot be read" in found["versions"]


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("damage", ["missing", "truncated"])
@pytest.mark.parametrize("kind", ["metadata_location", "manifest_list"])
def test_doctor_finds_a_version_without_its_metadata(history: fm.Lake, place: Place, kind: str, damage: str) -> None:
    path = local(getattr(history.catalog.history.tables_at(3)["events"], kind))
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-40])
    with place.open() as lake:
        assert "version(s) 3 cannot be read" in failed(lake)["versions"]


@pytest.mark.mostly_sqlite
def test_doctor_looks_at_a_sample_and_with_deep_at_all(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        for number in range(9):
            lake.overwrite("events", rows(number))
        some = look_at_history(lake.catalog, states_max=3, files_max=4)
        assert (some.states, some.states_looked, some.files_looked) == (10, 3, 4)
        every = look_at_history(lake.catalog, deep=True)
        assert every.states_looked == 10
        (gone,) = data_files(lake, 5)
        gone.unlink()
        assert look_at_history(lake.catalog, deep=True).versions == (5,)
        gone.touch()
        assert look_at_history(lake.catalog, deep=True).versions == (5,)
        assert lake.give_up_unreadable(apply=True).versions == (5,)
        assert "--deep" in versions_check(lake).detail
        assert "--deep" not in versions_check(lake, deep=True).detail


@pytest.mark.mostly_sqlite
def test_a_missing_deletions_file_is_found(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", "id long not null, name string", key=["id"])
        lake.append("people", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
        lake.delete("people", "id = 1")
        (file,) = lake.catalog.history.all_deletions()
        local(file).unlink()
        assert file in failed(lake)["table people"]


@pytest.mark.mostly_sqlite
def test_repair_looks_before_it_says_that_nothing_is_lost(history: fm.Lake, place: Place) -> None:
    (gone,) = data_files(history, 3)
    gone.unlink()
    (one,) = history.repair()
    assert (one.table, one.outcome, one.unreadable) == ("events", "unclear", (3,))
    with pytest.raises(fm.Corrupt):
        history.repair("events", apply=True)
    set_there(place, a="b")
    (planned,) = history.repair()
    assert (planned.happened, planned.choice, planned.unreadable) == ("changed", "revert", (3,))
    assert gone.name in planned.detail
    assert "lost" not in " ".join(planned.ways)
    # What is clear is done all the same; what cannot be read stays so, and is said.
    (done,) = history.repair("events", apply=True)
    assert (done.outcome, done.unreadable) == ("reverted", (3,))


@pytest.mark.mostly_sqlite
def test_a_table_whose_newest_files_are_gone_is_not_put_back(history: fm.Lake, place: Place) -> None:
    set_there(place, a="b")
    (gone,) = data_files(history, 5)
    gone.unlink()
    (planned,) = history.repair()
    assert (planned.outcome, planned.choice) == ("unclear", None)
    assert "restored from a copy" in " ".join(planned.ways)
    with pytest.raises(fm.Corrupt, match="files of the table are gone"):
        history.repair("events", choice="revert", apply=True)


def test_versions_that_cannot_be_read_can_be_given_up(history: fm.Lake) -> None:
    (gone,) = data_files(history, 3)
    gone.unlink()
    planned = history.give_up_unreadable()
    assert (planned.outcome, planned.versions, planned.held) == ("planned", (3,), ())
    assert gone.name in planned.faults[0]
    assert failed(history), "a plan changes nothing"
    done = history.give_up_unreadable(apply=True)
    assert (done.outcome, done.versions) == ("given_up", (3,))
    assert failed(history) == {}
    with pytest.raises(fm.BelowRetention):
        ids(history, version=3)
    assert (ids(history, version=2), ids(history)) == ([1], [4])
    (audit,) = history.audit()
    assert (audit.kind, audit.outcome) == ("repair", "given_up")
    assert "version(s) 3" in audit.detail
    assert history.give_up_unreadable(apply=True).outcome == "nothing_to_do"
    # Maintenance goes on.
    for number in range(10, 20):
        history.overwrite("events", rows(number))
    history.maintain.expire(keep="0s")
    assert history.maintain.sweep(grace="0s").outcome == "swept"
    check_lake(history.catalog)


@pytest.mark.mostly_sqlite
def test_a_version_that_is_held_is_not_given_up(history: fm.Lake) -> None:
    history.catalog.history.pin(3, holder="test", reason="held")
    for version in (2, 3, 5):
        (gone,) = data_files(history, version)
        gone.unlink()
    done = history.give_up_unreadable(apply=True)
    assert (done.outcome, done.versions, done.held) == ("given_up", (2,), (3, 5))
    assert set(failed(history)) == {"versions", "table events"}


@pytest.mark.mostly_sqlite
def test_a_version_is_unreadable_by_any_of_its_tables(history: fm.Lake) -> None:
    history.create_table("notes", EVENTS)  # version 6
    history.append("notes", rows(1))
    history.overwrite("events", rows(9))  # version 8: 5, 6 and 7 saw the state before
    (gone,) = data_files(history, 5)
    gone.unlink()
    assert history.give_up_unreadable().versions == (5, 6, 7)
