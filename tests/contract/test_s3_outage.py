"""A real S3 server that dies and comes back: no job fails while it restarts, and everybody is told when it stays away.

The server is a process of its own, killed with SIGKILL (floodmark/testing/s3.py).
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.errors import Invalid, Unavailable
from floodmark.serve.http.readiness import StoreWatch
from floodmark.storage import Storage
from floodmark.storage.probe import FOLDER, probe_bucket
from floodmark.testing.s3 import S3Process, s3_environment, s3_process, s3_stand_in
from tests.contract.test_http_api import asked

# Four retries, as it once was, are over after three seconds at most.
AWAY_S = 8.0
NO_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Process]:
    with s3_environment(), s3_process(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(autouse=True)
def credentials(server: S3Process) -> Iterator[None]:
    with s3_environment():
        yield


def catalog(folder: Path) -> str:
    return f"sqlite:///{folder}/catalog.db"


def run(folder: Path, *words: str, **environment: str) -> tuple[int, Any, str]:
    """The real command, with Java out of reach: exit code, what it printed as JSON, and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "floodmark.cli.main", "--json", *words],
        cwd=folder,
        env={**os.environ, "JAVA_HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr


def write_settings(folder: Path, bucket: str, options: dict[str, str], **more: str) -> None:
    lines = ["[lake]", f'path = "s3://{bucket}/lake"', f'catalog = "{catalog(folder)}"', "[storage]"]
    lines += [f'{name} = "{value}"' for name, value in {**options, **more}.items()]
    (folder / "floodmark.toml").write_text("\n".join(lines) + "\n")


@contextmanager
def away(server: S3Process) -> Iterator[None]:
    """The server is dead inside the block."""
    server.kill()
    try:
        yield
    finally:
        server.start()


def test_a_store_that_restarts_fails_no_job(server: S3Process, tmp_path: Path) -> None:
    bucket = server.make_bucket()
    root = f"s3://{bucket}/lake"
    storage = Storage(server.options)
    storage.put(f"s3://{bucket}/known", b"k" * 1000)

    with fm.open(root, create=True, catalog=catalog(tmp_path), storage_options=server.options) as lake:
        lake.create_table("events", "id long")
        begun, killed = threading.Barrier(2), threading.Event()

        def stream() -> None:
            with storage.writer(f"s3://{bucket}/big") as writer:
                writer.write(b"x" * (20 << 20))
                begun.wait(30)
                killed.wait(30)
                writer.write(b"y" * (20 << 20))

        with ThreadPoolExecutor(4) as jobs:
            streaming = jobs.submit(stream)
            begun.wait(30)
            server.kill()
            killed.set()
            back = threading.Timer(AWAY_S, server.start)
            back.start()
            appending = jobs.submit(lake.append, "events", [{"id": 1}])
            reading = jobs.submit(storage.read, f"s3://{bucket}/known")
            claiming = jobs.submit(storage.put_if_absent, f"s3://{bucket}/claimed", b"mine")
            assert appending.result(120).version == 2
            assert reading.result(120) == b"k" * 1000
            assert claiming.result(120) is True
            streaming.result(120)
            back.join()
        assert storage.size(f"s3://{bucket}/big") == 40 << 20
        assert lake.status()["version"] == 2
        assert lake.recover().files_deleted == 0
        assert lake.audit() == []


def test_how_long_a_store_is_waited_for_is_a_setting(server: S3Process) -> None:
    bucket = server.make_bucket()
    with away(server), pytest.raises(Unavailable, match=r"after [1-9][0-9]* retries.*retry_timeout: 1s"):
        Storage({**server.options, "retry_s": "1"}).read(f"s3://{bucket}/x")
    with pytest.raises(Invalid, match="whole number"):
        Storage({"retry_s": "soon"})


class DropsConditions(ThreadingHTTPServer):
    """Passes requests on without the header that makes a put conditional: a store that never learnt it."""

    daemon_threads = True
    behind: str


class PassOn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DropsConditions

    def pass_on(self) -> None:
        connection = http.client.HTTPConnection(self.server.behind, timeout=30)
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        kept = {name: value for name, value in self.headers.items() if name.lower() != "if-none-match"}
        connection.request(self.command, self.path, body or None, kept)
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        self.send_response_only(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header(
            "content-length", reply.headers["content-length"] if self.command == "HEAD" else f"{len(data)}"
        )
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_GET = do_HEAD = do_POST = do_DELETE = pass_on

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def unconditional() -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket of a store that ignores If-None-Match, and its options. The stand-in: a real one checks signatures."""
    with s3_stand_in() as behind:
        passing = DropsConditions(("127.0.0.1", 0), PassOn)
        passing.behind = behind.endpoint.removeprefix("http://")
        threading.Thread(target=passing.serve_forever, daemon=True).start()
        yield behind.make_bucket(), {**behind.options, "endpoint": f"http://127.0.0.1:{passing.server_address[1]}"}
        passing.shutdown()
        passing.server_close()


def test_a_probe_leaves_nothing_behind(server: S3Process) -> None:
    bucket = server.make_bucket()
    probe_bucket(server.options, f"s3://{bucket}/lake")
    assert list(Storage(server.options).list(f"s3://{bucket}")) == []


def test_init_names_a_missing_bucket_and_makes_nothing(server: S3Process, tmp_path: Path) -> None:
    write_settings(tmp_path, "no-such-bucket", server.options)
    code, _, said = run(tmp_path, "init")
    assert (code, "there is no such bucket" in said) == (4, True), said
    assert not (tmp_path / "catalog.db").exists()


def test_init_refuses_a_bucket_without_conditional_puts(
    unconditional: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    bucket, options = unconditional
    write_settings(tmp_path, bucket, options)
    code, _, said = run(tmp_path, "init")
    assert (code, "does not honour conditional puts" in said) == (2, True), said
    assert not (tmp_path / "catalog.db").exists()
    assert list(Storage(options).list(f"s3://{bucket}")) == []


def test_missing_credentials_are_named_with_the_host(server: S3Process, tmp_path: Path) -> None:
    bucket = server.make_bucket()
    write_settings(tmp_path, bucket, server.options)
    code, _, said = run(tmp_path, "init", **NO_CREDENTIALS)
    assert code == 4
    assert "there are no credentials for the object store" in said
    assert socket.gethostname() in said
    assert "AWS_ACCESS_KEY_ID" in said


def test_a_key_that_the_store_does_not_know_is_denied_not_a_missing_file(server: S3Process) -> None:
    if not server.is_real:
        pytest.skip("the stand-in knows every key")
    bucket = server.make_bucket()
    os.environ["AWS_ACCESS_KEY_ID"] = "nobody"
    with pytest.raises(Unavailable, match="permission denied"):
        probe_bucket(server.options, f"s3://{bucket}/lake")


def test_doctor_probes_the_bucket_without_a_jvm(server: S3Process, tmp_path: Path) -> None:
    bucket = server.make_bucket()
    write_settings(tmp_path, bucket, server.options)
    assert run(tmp_path, "init")[0] == 0

    def check(name: str, **environment: str) -> dict[str, str]:
        _, found, _ = run(tmp_path, "doctor", **environment)
        named: dict[str, dict[str, str]] = {one["check"]: one for one in found["checks"]}
        return named[name]

    assert check("store")["result"] == "ok"
    assert "honours conditional puts" in check("store")["detail"]
    assert "no credentials" in check("store", **NO_CREDENTIALS)["detail"]
    with away(server):
        found = check("store")
    assert found["result"] == "FAILED"
    assert "did not answer" in found["detail"]


def test_run_check_probes_the_bucket(
    server: S3Process, unconditional: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    write_settings(tmp_path, server.make_bucket(), server.options)
    assert run(tmp_path, "init")[0] == 0
    assert run(tmp_path, "run", "--check")[0] == 0
    write_settings(tmp_path, *unconditional)
    code, _, said = run(tmp_path, "run", "--check")
    assert (code, "conditional puts" in said) == (2, True), said


def test_readyz_sees_a_store_that_cannot_be_written(server: S3Process, tmp_path: Path) -> None:
    root = f"s3://{server.make_bucket()}/lake"
    with (
        fm.open(root, create=True, catalog=catalog(tmp_path), storage_options=server.options) as lake,
        asked(lake) as client,
    ):
        with away(server):
            answer = client.get("/readyz")
            assert answer.status_code == 503
            assert any("the lake's store cannot be written" in reason for reason in answer.json()["reasons"])
            assert "floodmark_ready 0" in client.get("/metrics").text
        assert client.get("/readyz").status_code == 200
        assert not [one for one in lake.catalog.storage.list(root) if f"/{FOLDER}/" in one.location]


def test_readyz_of_a_lake_that_is_only_read_writes_nothing(tmp_path: Path) -> None:
    with fm.open(tmp_path / "lake", create=True):
        pass
    with fm.open(tmp_path / "lake", read_only=True) as lake, asked(lake) as client:
        before = sorted(path for path in (tmp_path / "lake").rglob("*") if FOLDER in path.name)
        assert client.get("/readyz").status_code == 200
        assert sorted(path for path in (tmp_path / "lake").rglob("*") if FOLDER in path.name) == before == []


def test_a_local_store_that_cannot_be_written_is_seen_too(tmp_path: Path) -> None:
    with fm.open(tmp_path / "lake", create=True) as lake:
        store = StoreWatch(lake)
        (tmp_path / "lake" / FOLDER).write_text("in the way")
        assert "cannot be written" in str(store.problem())
        (tmp_path / "lake" / FOLDER).unlink()
        assert store.problem() is None
