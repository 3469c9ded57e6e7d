"""`floodmark spool` as an operator types it: what waits, what was put aside, and what is to be settled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_branch_commands import asked, said
from tests.conftest import EVENTS, ids, rows
from tests.intake_world import SLOW, bring, folder_of, intake_of, table_id, take


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A lake in ./lake whose events took rows: two records fed, with two rows put aside, and one that waits."""
    with fm.open(tmp_path / "lake", create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        with intake_of(lake) as intake:
            bring(lake, intake, "events", {"id": 1}, {"id": 2, "colour": "red"})
            bring(lake, intake, "events", {"id": "x", "name": "never"})
        with intake_of(lake, SLOW) as intake:
            take(lake, intake, "events", *rows(3))
    return tmp_path


def test_spools_are_listed_with_what_waits_and_what_was_put_aside(made: Path) -> None:
    [spool] = asked(made, "spool", "list")["spools"]
    assert (spool["table"], spool["state"], spool["error"]) == ("events", "waiting", None)
    assert (spool["waiting_records"], spool["waiting_rows"], spool["fed_records"]) == (1, 1, 2)
    assert (spool["fed_rows"], spool["quarantined"]) == (1, 2)
    assert "events" in said(made, "spool", "list").stdout
    status = asked(made, "status")
    assert status["spools"][0]["fed_rows"] == 1
    assert status["quarantined"] == 2
    empty = made / "other"
    fm.open(empty, create=True).close()
    assert said(made, "--lake", "other", "spool", "list").stdout.strip() == "no rows received over HTTP yet"


def test_rows_that_were_put_aside_are_looked_at_retried_and_dropped(made: Path) -> None:
    listed = asked(made, "spool", "quarantine", "list", "events")
    first, second = listed["entries"]
    assert (listed["rows"], first["rows"], first["record"], second["record"]) == (2, 1, 0, 1)
    assert first["reason"]["kind"] == "Invalid"
    shown = asked(made, "spool", "quarantine", "show", first["id"])
    assert [(one["line"], one["row"]) for one in shown["lines"]] == [(2, '{"id": 2, "colour": "red"}')]
    assert "colour" in said(made, "spool", "quarantine", "show", first["id"]).stdout

    refused = asked(made, "spool", "quarantine", "retry", first["id"], code=2)
    assert refused["error"]["kind"] == "Invalid"
    [done] = asked(made, "spool", "quarantine", "retry", first["id"], "--evolve")["retried"]
    assert (done["outcome"], done["rows"]) == ("committed", 1)
    [again] = asked(made, "spool", "quarantine", "retry", first["id"])["retried"]
    assert (again["outcome"], again["version"]) == ("already_committed", done["version"])

    planned = said(made, "spool", "quarantine", "drop", second["id"])
    assert (planned.stdout.strip(), planned.stderr.strip()) == ("would drop 1 row", "Add --apply to do it.")
    assert asked(made, "spool", "quarantine", "drop", second["id"], "--apply")["outcome"] == "dropped"
    assert asked(made, "spool", "quarantine", "drop", second["id"], "--apply")["outcome"] == "nothing_to_do"
    assert said(made, "spool", "quarantine", "list", "events").stdout.strip() == "no row is in quarantine"
    states = [one["state"] for one in asked(made, "spool", "quarantine", "list", "events", "--all")["entries"]]
    assert states == ["retried", "dropped"]
    for arguments in (("show", "none"), ("retry", "none"), ("drop", "none"), ("list", "nothing")):
        assert asked(made, "spool", "quarantine", *arguments, code=2)["error"]["kind"] == "NotFound"
    with fm.open(made / "lake") as lake:
        assert ids(lake) == [1, 2]
        check_lake(lake.catalog)


def test_a_refused_spool_is_planned_and_accepted(made: Path) -> None:
    assert said(made, "spool", "accept", "events").stdout.strip() == "nothing to do: the spool of events is not refused"
    assert asked(made, "spool", "accept", "nothing", code=2)["error"]["kind"] == "NotFound"
    with fm.open(made / "lake") as lake:
        folder = folder_of(lake) / table_id(lake, "events")
    shutil.rmtree(folder)
    assert "accept" in said(made, "spool", "list").stderr
    assert "spool" in asked(made, "status")["health"]
    planned = asked(made, "spool", "accept", "events")
    assert (planned["outcome"], planned["action"], planned["rows"]) == ("planned", "begin_anew", None)
    assert "from record 2 on" in planned["lost"]
    told = said(made, "spool", "accept", "events", "--apply").stdout
    assert "may be lost" in told
    assert "may be duplicated: nothing" in told
    assert asked(made, "spool", "accept", "events")["outcome"] == "nothing_to_do"
    with fm.open(made / "lake") as lake:
        with intake_of(lake) as intake:
            bring(lake, intake, "events", *rows(4))
        assert ids(lake) == [1, 4]
        check_lake(lake.catalog)


def test_a_damaged_spool_is_listed_as_refused_and_goes_on_without_what_is_lost(made: Path) -> None:
    with fm.open(made / "lake") as lake:
        folder = folder_of(lake) / table_id(lake, "events")
        with intake_of(lake, SLOW) as intake:
            take(lake, intake, "events", {"id": 4, "name": "four"})
            take(lake, intake, "events", {"id": 5})
    [path] = folder.glob("*.segment")
    path.write_bytes(path.read_bytes().replace(b"four", b"FOUR"))
    [spool] = asked(made, "spool", "list")["spools"]
    assert (spool["state"], spool["error"]["kind"]) == ("refused", "Corrupt")
    planned = asked(made, "spool", "accept", "events")
    assert (planned["outcome"], planned["action"], planned["twice"]) == ("planned", "mend", "nothing")
    assert planned["lost"].startswith("record 3: 1 row ")
    assert "aside" in said(made, "spool", "accept", "events", "--apply").stdout
    assert asked(made, "spool", "accept", "events")["outcome"] == "nothing_to_do"
    with fm.open(made / "lake") as lake:
        with intake_of(lake) as intake:
            assert intake.drain(20)
        assert ids(lake) == [1, 3, 5]
        check_lake(lake.catalog)


def test_a_retry_says_what_shall_count_if_a_key_was_written_since(tmp_path: Path) -> None:
    with fm.open(tmp_path / "lake", create=True, actor="test") as lake:
        lake.create_table("people", "id long not null, name string", key=["id"])
        with intake_of(lake) as intake:
            bring(lake, intake, "people", {"id": 1, "name": "old", "colour": "red"})
            bring(lake, intake, "people", {"id": 1, "name": "new"})
        [aside] = lake.catalog.spools.quarantine()
    again = ("spool", "quarantine", "retry", aside.id, "--evolve")
    assert asked(tmp_path, *again, code=3)["error"]["kind"] == "Conflict"
    assert asked(tmp_path, *again, "--overwrite", "--keep-newer", code=2)["error"]["kind"] == "Invalid"
    assert "1 row discarded" in said(tmp_path, *again, "--keep-newer").stdout
