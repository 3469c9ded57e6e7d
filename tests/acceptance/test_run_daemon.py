"""`floodmark run` as the daemon: one per lake, checked before it starts, its tasks, and its end, in a real process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.testing.children import run_child
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_run_command import WAIT_S, command, prepare, running
from tests.conftest import ids, rows

QUICK = '[maintain]\nevery = "off"\n'


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run_child(prepare, str(tmp_path))
    return tmp_path


def send(client: httpx.Client, *numbers: int, key: str | None = None, wait: bool = False) -> httpx.Response:
    body = "".join(json.dumps(row) + "\n" for row in rows(*numbers))
    headers = {} if key is None else {"Idempotency-Key": key}
    params = {"wait": "committed"} if wait else {}
    return client.post("/api/tables/events/rows", content=body, headers=headers, params=params)


def until(find: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := find()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)
    return found


def status(folder: Path) -> dict[str, Any]:
    code, text = command(folder, "--lake", "lake", "--json", "status")
    assert code == 0
    found: dict[str, Any] = json.loads(text)
    return found


def task(folder: Path, name: str) -> dict[str, Any] | None:
    return next((one for one in status(folder)["daemon"]["tasks"] if one["name"] == name), None)


# ── one per lake ──


def test_a_second_daemon_says_who_holds_the_lake_and_a_killed_one_is_taken_over(made: Path) -> None:
    with running(made) as (first, client):
        code, text = command(made, "--lake", "lake", "run", "--bind", "127.0.0.1:0")
        assert code == 4
        for fact in (
            f"host={socket.gethostname()}",
            f"pid={first.pid}",
            "since=20",
            f"address=http://127.0.0.1:{client.base_url.port}",
        ):
            assert fact in text
        # Answered, and killed before anything of it is in the table: each row comes in once all the same.
        assert send(client, 1, 2, key="a").status_code == 202
        assert send(client, 3, key="b").status_code == 202
        os.kill(first.pid, signal.SIGKILL)
        first.wait(WAIT_S)
    with running(made) as (second, client):
        assert send(client, 3, key="b").json()["outcome"] == "already_taken"
        assert send(client, 4, wait=True).json()["outcome"] == "committed"
        assert status(made)["daemon"]["pid"] == second.pid
    with fm.open(made / "lake") as lake:
        assert ids(lake) == [1, 2, 3, 4]
        assert lake.status()["daemon"] is None
        check_lake(lake.catalog)


def test_a_daemon_that_another_one_replaced_stops_at_once_with_its_own_exit_code(made: Path) -> None:
    (made / "floodmark.toml").write_text(QUICK)
    with running(made) as (child, _):
        with fm.open(made / "lake", recover=False) as lake, lake.catalog.database.write() as tx:
            # As if it had been paused for longer than its lease, and another one had come.
            tx.execute(update(tables.daemon).values(run="another", process="another"))
        assert child.wait(WAIT_S) == 5


# ── the end ──


def test_rows_that_were_taken_are_fed_before_it_ends(made: Path) -> None:
    with running(made) as (child, client):
        for number in range(5):
            assert send(client, number).status_code == 202
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(WAIT_S) == 0
    with fm.open(made / "lake") as lake:
        assert ids(lake) == [0, 1, 2, 3, 4]


def test_what_does_not_end_in_time_is_cut_off_with_a_word_and_exit_code_1(made: Path) -> None:
    (made / "floodmark.toml").write_text(f'{QUICK}[serve]\ndrain = "3s"\n')
    with running(made) as (child, client):
        assert send(client, 1, wait=True).status_code == 200
        with fm.open(made / "lake", recover=False) as lake, lake.catalog.database.write() as tx:
            # Somebody keeps the catalog for himself: what is taken now cannot be committed in time.
            lake.catalog.database.lock_lake(tx)
            assert send(client, 2).status_code == 202
            os.kill(child.pid, signal.SIGTERM)
            child.wait(WAIT_S)
        assert child.process.exitcode == 1
    said = "".join(path.read_text() for path in made.glob("out-*.err"))
    assert "rows wait in the spool" in said
    assert "cut off" in said
    with running(made), fm.open(made / "lake") as lake:
        until(lambda: ids(lake) == [1, 2])
        check_lake(lake.catalog)


def test_who_is_cut_off_is_not_told_that_it_failed(made: Path) -> None:
    """A second signal hurries the end: rows that wait for their commit are durable, and no answer may say otherwise."""
    with running(made) as (child, client):
        place = (client.base_url.host, client.base_url.port or 80)
        body = b'{"id": 1}\n'
        head = b"POST /api/tables/events/rows%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection(place, WAIT_S) as waits, socket.create_connection(place, WAIT_S) as half:
            half.sendall(head % (b"", 99) + body)
            waits.sendall(head % (b"?wait=committed", len(body)) + body)
            until(lambda: any((made / "lake").rglob("*.segment")))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
                os.kill(child.pid, signal.SIGTERM)
            for one in (waits, half):
                with contextlib.suppress(ConnectionError):
                    assert one.recv(1000)[:11] in (b"", b"HTTP/1.1 20")
        child.wait(WAIT_S)
    with running(made), fm.open(made / "lake") as lake:
        until(lambda: ids(lake) == [1])
        check_lake(lake.catalog)


# ── tasks ──

WORKING = """\
[maintain]
every = "off"
[tables.more]
schema = "id long not null, name string"
[sources.drop]
type = "files"
path = "in"
table = "more"
every = "100ms"
settle = "100ms"
[sinks.good]
type = "files"
tables = ["more"]
path = "out"
format = "jsonl"
every = "100ms"
[sinks.bad]
type = "http"
tables = ["more"]
url = "http://127.0.0.1:9/"
tries = 1
every = "100ms"
"""


def test_files_come_in_and_go_out_and_one_bad_sink_stops_nobody_and_is_seen(made: Path) -> None:
    (made / "floodmark.toml").write_text(WORKING)
    # The table is declared, and not there: nothing is made unless that is asked for.
    assert command(made, "--lake", "lake", "run", "--bind", "127.0.0.1:0")[0] == 2
    with running(made, "--create") as (_, client):
        (made / "in" / "a.jsonl").write_text('{"id": 1, "name": "one"}\n')
        (made / "in" / "b.jsonl").write_text('{"id": 2}\n{"id": "two"}\n')
        until(lambda: list((made / "out").rglob("*.jsonl")))
        until(lambda: list((made / "in" / ".failed").glob("*.reason.json")))
        found = until(lambda: (one := task(made, "sink bad")) and one["failures"] and one)
        assert found["state"] in ("failed", "running")
        assert found["last_error"]["kind"] == "Unavailable"
        good = task(made, "sink good")
        assert good is not None
        assert (good["failures"], good["last_error"]) == (0, None)
        assert "bad" in status(made)["health"]
        assert client.get("/readyz").status_code == 200
        code, text = command(made, "--lake", "lake", "status")
        assert code == 0
        assert "bad" in text
    (shipped,) = (made / "out").rglob("*.jsonl")
    assert json.loads(shipped.read_text())["name"] == "one"
    assert (made / "in" / ".loaded" / "a.jsonl").exists()
    assert json.loads((made / "in" / ".failed" / "b.jsonl.reason.json").read_text())["error"]["facts"]["line"] == "2"


# ── settings ──


def test_a_check_says_what_is_wrong_and_where_and_changes_nothing(made: Path) -> None:
    file = made / "floodmark.toml"
    file.write_text('[serve]\nbnd = "x"\n')
    code, text = command(made, "--lake", "lake", "run", "--check")
    assert (code, "floodmark.toml:2:1" in text, "Did you mean bind?" in text) == (2, True, True)
    file.write_text('[sources.in]\ntype = "files"\npath = "in"\ntable = "evnts"\n')
    (made / "in").mkdir()
    code, text = command(made, "--lake", "lake", "run", "--check")
    assert (code, "floodmark.toml:4:9" in text) == (2, True)
    file.write_text(WORKING)
    before = status(made)["version"]
    code, text = command(made, "--lake", "lake", "--json", "run", "--check")
    assert (code, json.loads(text)) == (
        0,
        {"outcome": "checked", "file": "floodmark.toml", "tables": 1, "sources": 1, "sinks": 2},
    )
    assert (status(made)["version"], status(made)["sinks"]) == (before, [])


def test_without_a_lake_it_is_checked_and_made_only_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "floodmark.toml").write_text(WORKING)
    (tmp_path / "in").mkdir()
    assert command(tmp_path, "--lake", "lake", "run", "--check")[0] == 2
    assert command(tmp_path, "--lake", "lake", "run", "--check", "--create")[0] == 0
    assert not (tmp_path / "lake").exists()


def test_tables_that_are_declared_otherwise_are_told_and_left_as_they_are(made: Path) -> None:
    (made / "floodmark.toml").write_text(
        QUICK + '[tables.events]\nschema = "id long not null, name string, more int"\n'
    )
    with running(made, "--create"):
        pass
    (announced,) = (json.loads(path.read_text()) for path in made.glob("out-*") if path.suffix != ".err")
    (difference,) = announced["differences"]
    assert difference.startswith("table events differs from its declaration: ")
    assert "floodmark plan" in difference
    with fm.open(made / "lake") as lake:
        assert [field.name for field in lake.schema("events").fields if field.name != "_seq"] == ["id", "name"]


SINKS = """\
[sinks.out]
type = "files"
tables = ["events"]
path = "out"
format = "{format}"
part_bytes = "{size}"
[sinks.gone]
type = "files"
tables = [{tables}]
path = "{path}"
"""


def test_sinks_that_are_declared_otherwise_are_told_with_what_differs_and_a_command_that_works(made: Path) -> None:
    file = made / "other.toml"
    ways = ("--config", "other.toml")
    file.write_text(QUICK + SINKS.format(format="parquet", size="1MiB", tables='"events"', path="here"))
    with running(made, *ways):
        pass
    file.write_text(QUICK + SINKS.format(format="jsonl", size="2MiB", tables='"events", "people"', path="there"))
    with running(made, *ways):
        pass
    said = max(made.glob("out-*"), key=lambda path: path.stat().st_mtime_ns if path.suffix != ".err" else 0)
    out, gone = json.loads(said.read_text())["differences"]
    assert "format is parquet in the lake, and jsonl in the file" in out
    assert "part_bytes is 1048576 in the lake, and 2097152 in the file" in out
    (advised,) = re.findall(r"`floodmark (.*?)`", out)
    assert advised == "--config other.toml sink set out --set format=jsonl --set part_bytes=2097152"
    assert "tables is events in the lake, and events, people in the file" in gone
    assert f"path is {made}/here in the lake, and {made}/there in the file" in gone
    (removed,) = re.findall(r"`floodmark (.*?)`", gone)
    for line in (advised, removed):
        assert command(made, "--lake", "lake", *shlex.split(line))[0] == 0
    with running(made, *ways):
        pass
    said = max(made.glob("out-*"), key=lambda path: path.stat().st_mtime_ns if path.suffix != ".err" else 0)
    assert json.loads(said.read_text())["differences"] == []


def test_a_table_that_cannot_be_as_declared_is_told_with_the_reason_and_the_way(made: Path) -> None:
    (made / "floodmark.toml").write_text(QUICK + '[tables.events]\nschema = "id long not null, more int"\n')
    with running(made):
        pass
    (announced,) = (json.loads(path.read_text()) for path in made.glob("out-*") if path.suffix != ".err")
    told = " ".join(announced["differences"])
    assert "this change is refused" in told
    assert "renamed_from" in told
    assert "`floodmark plan" not in told
