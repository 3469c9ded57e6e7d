"""Fixtures of the contract tests: every kind of store, and a stand-in S3 server with its credentials around each test.

Where Versity's S3 gateway is installed, it runs the suites of stores too (floodmark/testing/s3.py).
With FLOODMARK_TEST_S3_ENDPOINT and FLOODMARK_TEST_S3_BUCKET (and the AWS_* credentials) in the environment, a real
S3 runs the same suites.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from floodmark.clock import new_id
from floodmark.index import covering, writing
from floodmark.rows.index import hashing
from floodmark.storage import Storage, root_location
from floodmark.testing.s3 import S3Process, S3Server, gateway, s3_environment, s3_process, s3_stand_in

pytest.register_assert_rewrite("floodmark.testing.storage_contract", "floodmark.testing.fault_contract")

REAL_ENDPOINT = os.environ.get("FLOODMARK_TEST_S3_ENDPOINT")
REAL_BUCKET = os.environ.get("FLOODMARK_TEST_S3_BUCKET")
STORES = ["local", "memory", "s3", *(["gateway"] if gateway() else [])]
STORES += ["real_s3"] if REAL_ENDPOINT and REAL_BUCKET else []


@pytest.fixture(scope="session")
def stand_in() -> Iterator[S3Server]:
    with s3_stand_in() as server:
        yield server


@pytest.fixture(scope="session")
def gateway_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Process]:
    with s3_process(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_server(stand_in: S3Server) -> Iterator[S3Server]:
    with s3_environment():
        yield stand_in


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Options and root location of an empty folder in one kind of store."""
    if request.param == "local":
        yield {}, root_location(str(tmp_path / "lake"))
    elif request.param == "memory":
        yield {}, f"memory://{new_id()}/lake"
    elif request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        yield server.options, f"s3://{server.make_bucket()}/some/lake"
    elif request.param == "gateway":
        process: S3Process = request.getfixturevalue("gateway_process")
        with s3_environment():
            yield process.options, f"s3://{process.make_bucket()}/some/lake"
    else:
        assert REAL_ENDPOINT
        options = {"endpoint": REAL_ENDPOINT, "region": os.environ.get("AWS_REGION", "us-east-1")}
        root = f"s3://{REAL_BUCKET}/floodmark-test-{new_id()}"
        yield options, root
        Storage(options).delete_prefix(root)


@pytest.fixture
def options(store: tuple[dict[str, str], str]) -> dict[str, str]:
    return store[0]


@pytest.fixture
def root(store: tuple[dict[str, str], str]) -> str:
    return store[1]


# ── suites of keyed writes, which give the same results whatever an index covers (I11) ──

KEYED = (
    *("test_branch_merge", "test_catalog_keyed", "test_delete_keys", "test_keyed_types", "test_partial_merge"),
    *("test_references_writes", "test_update"),
)
# What the index of the key says: all, nothing, something of half of the files, and hashes that many keys share.
INDEXED, UNCOVERED, HALF, COLLIDING = "indexed", "uncovered", "half", "colliding"
NARROW = hashing.Encoder(number=1004, bits=4)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in KEYED:
        metafunc.fixturenames.insert(0, "index_mode")
        others = [pytest.param(mode, marks=pytest.mark.sampled(3)) for mode in (UNCOVERED, HALF, COLLIDING)]
        metafunc.parametrize("index_mode", [INDEXED, *others], indirect=True)


@pytest.fixture
def index_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How new files are covered, in this process; killed ones cover all."""
    real = writing.write_segments

    def some(storage: Any, sessions: Any, folder: str, schema: Any, indexes: Any, files: Any, **named: Any) -> Any:
        chosen = [file for file in files if request.param == HALF and crc32(file.path.encode()) % 2]
        return real(storage, sessions, folder, schema, indexes, chosen, **named)

    if request.param in (UNCOVERED, HALF):
        monkeypatch.setattr(writing, "write_segments", some)
    if request.param == COLLIDING:
        monkeypatch.setitem(hashing.ENCODERS, NARROW.number, NARROW)
        monkeypatch.setattr(writing, "ENCODER", NARROW)
    yield
    covering.form_of.cache_clear()
