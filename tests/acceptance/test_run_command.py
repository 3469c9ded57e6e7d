"""`floodmark run` in a process of its own: started, announced, ended by a signal, killed, and started again.

What it does by itself (tasks, settings, drop folders) is in test_run_daemon.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest

import floodmark as fm
from floodmark.cli.main import main
from floodmark.failpoints import VARIABLE
from floodmark.serve.http.access import token_hash
from floodmark.serve.http.server import parse_bind
from floodmark.testing.children import Child, preload, run_child
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows

WAIT_S = 60

preload("floodmark.serve.daemon.lifecycle", "floodmark.cli.main")


def run_main(arguments: list[str], folder: str, out: str) -> int:
    """The command in this process, with its output in a file, line by line, and its errors in another."""
    for name in [name for name in os.environ if name.startswith("FLOODMARK_") and name != VARIABLE]:
        del os.environ[name]
    os.chdir(folder)
    with (
        open(out, "w", buffering=1) as told,
        open(f"{out}.err", "w", buffering=1) as errors,
        redirect_stdout(told),
        redirect_stderr(errors),
    ):
        try:
            main(arguments)
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


@contextmanager
def running(folder: Path, *arguments: str, failpoint: str | None = None) -> Iterator[tuple[Child, httpx.Client]]:
    """A server of the lake in ./lake at any free port, forked from a warm process; and a client of it."""
    out = folder / f"out-{time.monotonic_ns()}"
    given = ["--lake", "lake", "--json", "run", "--bind", "127.0.0.1:0", *arguments]
    child = Child(run_main, given, str(folder), str(out), failpoint=failpoint)
    try:
        with httpx.Client(base_url=announced(child, out)["address"], timeout=WAIT_S) as client:
            yield child, client
    finally:
        if child.process.is_alive():
            os.kill(child.pid, signal.SIGTERM)
        child.wait(WAIT_S)


def announced(child: Child, out: Path) -> dict[str, Any]:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and child.process.is_alive():
        text = out.read_text() if out.exists() else ""
        if text.endswith("\n"):
            found: dict[str, Any] = json.loads(text)
            return found
        time.sleep(0.01)
    raise AssertionError("the server did not say where it is")


def prepare(folder: str) -> None:
    with fm.open(f"{folder}/lake", create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("people", rows(1, 2))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run_child(prepare, str(tmp_path))
    return tmp_path


def sender(first: int, last: int, unit: str = "0..5") -> dict[str, str]:
    return {
        "Floodmark-Sender": "lake/sink/table/rows",
        "Floodmark-Epoch": "1",
        "Floodmark-Unit": unit,
        "Floodmark-Part": f"{first}-{last}",
    }


def post(client: httpx.Client, table: str, data: list[dict[str, Any]], headers: dict[str, str]) -> httpx.Response:
    body = "".join(json.dumps(row) + "\n" for row in data)
    return client.post(f"/api/tables/{table}/rows?wait=committed", content=body, headers=headers)


# ── a server's life ──


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_ends_well(made: Path, end: signal.Signals) -> None:
    with running(made) as (child, client):
        assert client.get("/healthz").json() == {"status": "ok"}
        answer = post(client, "events", rows(1), sender(0, 1))
        assert answer.json()["outcome"] == "committed"
        os.kill(child.pid, end)
        assert child.wait(WAIT_S) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(client.base_url.join("/healthz"))
    with fm.open(made / "lake") as lake:
        check_lake(lake.catalog)
        assert ids(lake) == [1]


def test_requests_that_are_under_way_are_finished_first(made: Path) -> None:
    """The server has asked for the body, which has not come when the signal does."""
    body = b'{"id": 1, "name": "a"}\n'
    asked = [
        "POST /api/tables/events/rows HTTP/1.1",
        "Host: localhost",
        "Expect: 100-continue",
        f"Content-Length: {len(body)}",
    ]
    with running(made) as (child, client):
        place = (client.base_url.host, client.base_url.port or 0)
        with socket.create_connection(place, timeout=WAIT_S) as connection:
            connection.sendall("\r\n".join([*asked, "", ""]).encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
            os.kill(child.pid, signal.SIGTERM)
            while is_served(place):
                time.sleep(0.02)
            connection.sendall(body)
            assert connection.recv(1000).startswith(b"HTTP/1.1 202 ")
        assert child.wait(WAIT_S) == 0
    with fm.open(made / "lake") as lake:
        assert ids(lake) == [1]


def is_served(place: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(place, timeout=WAIT_S):
            return True
    except OSError:
        return False


def test_as_a_person_starts_it_says_one_line_and_prints_nothing_else(made: Path) -> None:
    arguments = [sys.executable, "-m", "floodmark.cli.main", "--lake", "lake", "run", "--bind", "127.0.0.1:0"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLOODMARK_")}
    with subprocess.Popen(
        arguments, cwd=made, env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = line.partition(" at ")[2].partition(";")[0]
        try:
            assert httpx.get(f"{address}/healthz", timeout=WAIT_S).status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "", "")
    assert line.startswith("floodmark: serving ")
    assert "anyone on this machine may write" in line


# ── who may write ──


def command(folder: Path, *arguments: str) -> tuple[int, str]:
    out = folder / "command-out"
    code = run_child(run_main, list(arguments), str(folder), str(out))
    return code, out.read_text() + Path(f"{out}.err").read_text()


def test_a_token_is_printed_once_and_its_hash_is_all_that_is_stored(made: Path) -> None:
    code, text = command(made, "run", "--new-token", "--json")
    found = json.loads(text)
    assert (code, found["token_sha256"]) == (0, token_hash(found["token"]))
    lines = command(made, "run", "--new-token", "--role", "admin", "--name", "ops")[1]
    assert '[serve.tokens.ops]\nsha256 = "' in lines
    assert lines.endswith('role = "admin"\n')
    (made / "floodmark.toml").write_text(f'[serve]\ntoken_sha256 = "{found["token_sha256"]}"\n')
    with running(made) as (_, client):
        assert post(client, "events", rows(1), sender(0, 1)).status_code == 401
        allowed = {**sender(0, 1), "Authorization": f"Bearer {found['token']}"}
        assert post(client, "events", rows(1), allowed).status_code == 200
    kept = [path for path in made.rglob("*") if path.is_file() and "command-out" not in path.name]
    assert found["token"].encode() not in b"".join(path.read_bytes() for path in kept)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "example.com:80"])
def test_an_address_that_others_reach_needs_a_token(made: Path, bind: str) -> None:
    code, text = command(made, "--lake", "lake", "run", "--bind", bind)
    assert code == 2
    assert "--new-token" in text


def test_with_a_token_it_serves_at_any_address(made: Path) -> None:
    (made / "floodmark.toml").write_text(f'[serve]\ntoken_sha256 = "{token_hash("x")}"\nbind = "127.0.0.1:1"\n')
    # The option counts more than the setting.
    with running(made, "--bind", "0.0.0.0:0") as (_, client):
        port = client.base_url.port
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=WAIT_S).status_code == 200


@pytest.mark.parametrize("setting", ['token_sha256 = "the token itself"', 'tokn_sha256 = "x"', "bind = 5"])
def test_a_wrong_setting_is_refused_and_no_secret_is_shown(made: Path, setting: str) -> None:
    (made / "floodmark.toml").write_text(f"[serve]\n{setting}\n")
    code, text = command(made, "--lake", "lake", "run", "--bind", "127.0.0.1:0")
    assert code == 2
    assert "the token itself" not in text


@pytest.mark.parametrize("bind", ["8787", "127.0.0.1", ":8787", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:-1"])
def test_an_address_that_is_none_is_invalid(bind: str) -> None:
    with pytest.raises(fm.Invalid):
        parse_bind(bind)


def test_an_address_that_is_taken_is_unavailable(made: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = command(made, "--lake", "lake", "run", "--bind", f"127.0.0.1:{taken.getsockname()[1]}")
    assert code == 4
    assert "Unavailable" in text


def test_addresses_of_both_families_are_understood() -> None:
    assert parse_bind("[::1]:80") == ("::1", 80)
    assert parse_bind("localhost:0") == ("localhost", 0)


def test_without_a_lake_there_is_nothing_to_serve(tmp_path: Path) -> None:
    assert command(tmp_path, "--lake", "lake", "run", "--bind", "127.0.0.1:0")[0] == 2


# ── killed ──

MIXED = [{"id": 1, "_change": "delete"}, {"id": 2, "name": "two"}, {"id": 3, "name": "three"}]
SENT: dict[str, list[dict[str, Any]]] = {"events": rows(7, 7, 8), "people": MIXED}
STORED = {"events": [7, 7, 8], "people": [2, 3]}
POINTS = [
    *(("events", f"append.{step}") for step in ("begun", "staged", "sealed", "built", "moved", "published")),
    *(("people", f"merge.{step}") for step in ("staged:2", "rewritten:2", "sealed", "moved", "published")),
]


@pytest.mark.parametrize(("table", "point"), POINTS)
def test_a_server_killed_at_any_step_stores_a_part_once_when_it_is_sent_again(
    made: Path, table: str, point: str
) -> None:
    with running(made, failpoint=point) as (child, client):
        with pytest.raises(httpx.TransportError):
            post(client, table, SENT[table], sender(0, 3))
        child.wait(WAIT_S)
        assert child.killed
    with running(made) as (_, client):
        outcomes = [post(client, table, SENT[table], sender(0, 3)).json()["outcome"] for _ in range(2)]
        assert post(client, table, rows(9), sender(0, 1, unit="5..6")).json()["outcome"] == "committed"
        late = post(client, table, SENT[table], sender(0, 3)).json()["outcome"]
    healed = point.partition(".")[2] in ("sealed", "built", "moved", "published")
    assert outcomes == ["already_committed" if healed else "committed", "already_committed"]
    assert late == "already_committed"
    with fm.open(made / "lake") as lake:
        check_lake(lake.catalog)
        assert ids(lake, table) == [*STORED[table], 9]


def test_a_lake_on_postgresql_is_served_too(new_place: Callable[[str], Place], tmp_path: Path) -> None:
    place = new_place("postgresql")
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
    with running(tmp_path, "--lake", place.path, "--catalog", str(place.catalog)) as (_, client):
        assert post(client, "events", rows(1), sender(0, 1)).json()["outcome"] == "committed"
        assert post(client, "events", rows(1), sender(0, 1)).json()["outcome"] == "already_committed"
    with place.open() as lake:
        assert ids(lake) == [1]
