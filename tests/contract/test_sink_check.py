"""Trying a destination before the first run: what is found is said, no row is sent, nothing is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.cli.main import main
from floodmark.serve.http.body import RequestLimits
from floodmark.sinks.files.units import read_units
from floodmark.testing.children import preload, run_killed
from floodmark.testing.receiver import Receiver, answers
from tests.conftest import Place, rows
from tests.contract.test_receive_http import served

preload("tests.contract.test_sink_check", "floodmark.sinks.sinks")

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def place(new_place: Callable[[str], Place]) -> Place:
    return new_place("sqlite")


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        lake.append("events", rows(1, 2))
        yield lake


def marks(lake: fm.Lake, name: str) -> dict[str, Any]:
    about = lake.sinks.about(name)
    about["tables"] = [{**one, "lag_ms": None} for one in about["tables"]]
    return about


def checked(lake: fm.Lake, name: str = "out") -> dict[str, Any]:
    before = marks(lake, name)
    found = lake.sinks.check(name)
    assert marks(lake, name) == before, "a check changed the sink"
    return {"all": found["outcome"], **found["tables"][0]}


def try_out(place: Place) -> None:
    with place.open(read_only=True) as lake:
        lake.sinks.check("out")


# ── files ──


def test_a_folder_that_can_be_written_is_ready_and_nothing_stays_in_it(lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"))
    found = checked(lake)
    assert (found["all"], found["found"]["written"]) == ("ready", True)
    assert [file for _, _, files in os.walk(tmp_path / "out") for file in files] == []


def test_a_folder_that_cannot_be_written_is_said_before_the_first_run(lake: fm.Lake, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"))
    found = checked(lake)
    assert (found["all"], found["error"]["kind"]) in (("failed", "Unavailable"), ("failed", "Invalid"))


def test_a_path_that_cannot_be_made_is_said_with_what_to_check(lake: fm.Lake, tmp_path: Path) -> None:
    (tmp_path / "nope").write_text("no folder can be below this")
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "nope" / "x"))
    error = checked(lake)["error"]
    assert (error["kind"], "/nope/x" in error["facts"]["location"]) == ("Unavailable", True)
    assert (error["message"], bool(error["facts"]["reason"])) == ("cannot write", True)
    assert "Check the path" in error["advice"]


def test_killed_in_a_check_a_reader_takes_nothing_of_it(place: Place, lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"))
    lake.close()
    assert run_killed(try_out, place, failpoint="check.put")
    with place.open() as again:
        assert again.sinks.check("out")["outcome"] == "ready"
        assert again.sinks.run("out").outcome == "shipped"
        assert [unit.rows for unit in read_units(str(tmp_path / "out"))] == [2]


# ── HTTP ──


def test_an_endpoint_that_answers_is_ready_and_gets_no_row(lake: fm.Lake) -> None:
    with Receiver() as receiver:
        lake.sinks.add("out", "http", tables="events", url=receiver.url + "/{table}")
        assert checked(lake)["all"] == "ready"
        assert {request.method for request in receiver.requests} == {"OPTIONS"}
        assert receiver.rows == []


@pytest.mark.parametrize(
    ("status", "kind", "advice"),
    [
        (401, "Unavailable", "token_env"),
        (404, "Invalid", "floodmark sink set out --url"),
        (503, "Unavailable", "later"),
    ],
)
def test_an_endpoint_that_would_not_take_rows_is_said(lake: fm.Lake, status: int, kind: str, advice: str) -> None:
    with Receiver() as receiver:
        receiver.script(answers(status))
        lake.sinks.add("out", "http", tables="events", url=receiver.url + "/{table}")
        found = checked(lake)
        assert (found["all"], found["error"]["kind"]) == ("failed", kind)
        assert advice in found["error"]["advice"]


def test_an_endpoint_that_is_away_is_unavailable(lake: fm.Lake) -> None:
    with Receiver() as receiver:
        lake.sinks.add("out", "http", tables="events", url=receiver.url + "/{table}")
    assert checked(lake)["error"]["kind"] == "Unavailable"


def test_another_lake_is_asked_for_its_table_without_a_row(lake: fm.Lake, new_place: Callable[[str], Place]) -> None:
    with new_place("sqlite").open(create=True) as target, served(target, limits=RequestLimits()) as client:
        url = f"{str(client.base_url).rstrip('/')}/api/tables/{{table}}/rows?wait=committed"
        lake.sinks.add("out", "http", tables="events", url=url)
        assert "not take rows at this address" in checked(lake)["error"]["message"]
        target.create_table("events", "id long not null, name string")
        version = target.status()["version"]
        assert checked(lake)["found"]["lake"] is True
        assert target.status()["version"] == version


# ── Iceberg ──


def iceberg(folder: Path, **catalog: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    known = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    return {"catalog": {**known, **catalog}, "namespace": "mart"}


def test_an_iceberg_catalog_is_tried_before_and_after_its_table_is_made(lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("out", "iceberg", tables="events", **iceberg(tmp_path / "ice"))
    found = checked(lake)["found"]
    assert (found["exists"], found["written"]) == (False, True)
    assert lake.sinks.run("out").outcome == "shipped"
    assert checked(lake)["found"]["exists"] is True
    left = [file for _, _, files in os.walk(tmp_path) for file in files if file.startswith("_floodmark-check")]
    assert left == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"type": "sqll"}, "floodmark sink set out --catalog"),
        ({"token": "env:NO_SUCH_VARIABLE"}, "--catalog token=env:"),
    ],
    ids=["mistyped_type", "missing_variable"],
)
def test_a_wrong_catalog_is_answered_with_sink_set_and_not_with_replay(
    lake: fm.Lake, tmp_path: Path, wrong: dict[str, str], words: str
) -> None:
    settings = iceberg(tmp_path / "ice")
    lake.sinks.add("out", "iceberg", tables="events", **iceberg(tmp_path / "ice", **wrong))
    run = lake.sinks.run("out").error
    again = lake.sinks.run("out").error  # with its unit open
    for advice in (checked(lake)["error"]["advice"], run.advice if run else "", again.advice if again else ""):
        assert words in advice
        assert "replay" not in advice
    # And it is the way out: the open unit goes on.
    lake.sinks.set("out", catalog=settings["catalog"])
    done = lake.sinks.run("out")
    assert (done.outcome, done.rows) == ("shipped", 2)


def test_a_missing_token_variable_is_answered_with_sink_set_and_not_with_replay(lake: fm.Lake) -> None:
    with Receiver() as receiver:
        lake.sinks.add("out", "http", tables="events", url=receiver.url, token_env="NO_SUCH_TOKEN")
        for _ in range(2):
            error = lake.sinks.run("out").error
            assert error is not None
            assert "floodmark sink set out --token-env" in error.advice
            assert "replay" not in error.advice
        assert "--token-env" in checked(lake)["error"]["advice"]


# ── the command ──


def test_the_command_says_it_in_json_and_in_its_exit_code(
    lake: fm.Lake, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with Receiver() as receiver:
        lake.sinks.add("out", "http", tables="events", url=receiver.url + "/{table}")
        path = str(place.path)
        for scripted, code, outcome in (
            ((), 0, "ready"),
            ((answers(503),), 4, "failed"),
            ((answers(404),), 2, "failed"),
        ):
            receiver.script(*scripted)
            with pytest.raises(SystemExit) as ended:
                main(["--lake", path, "--json", "sink", "check", "out"])
            assert (ended.value.code or 0, json.loads(capsys.readouterr().out)["outcome"]) == (code, outcome)
