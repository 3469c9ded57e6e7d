"""Fixtures that every kind of test may use: a place for a lake on each database, and a real PostgreSQL server."""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.testing.children import preload
from floodmark.testing.postgres import PostgresServer, postgres_server
from tests import short_java
from tests.left_out import LeftOut

EVENTS = "id long not null, name string"
DATABASES = ("sqlite", "postgresql")

# Files are dealt out to workers in this order: a long one that comes last would leave the others idle.
LONGEST_FIRST = ("simulation", "browser", "crash", "spark", "interop", "acceptance", "contract", "unit")

# `make test` must not take too long: from so many cases of a test on each third, or fifth, is run; all in `make soak`.
MANY, VERY_MANY = 4, 8
THINNED = LONGEST_FIRST[:-1]

preload("tests.conftest", "tests.warm")

# As a terminal starts programs: nohup, cron and some runners ignore SIGINT, and tests interrupt themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LEFT_OUT = LeftOut()


def pytest_configure() -> None:
    # Not at import: benchmarks import parts of this, and a JVM with one compiler would make plain Spark look slow.
    short_java.use()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended: the process that started it collects nothing itself, and learns what was left out."""
    LEFT_OUT.cases.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = LEFT_OUT.cases


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was left out by choice, and tests that need a browser and found none: said once, where it is seen."""
    chosen = terminalreporter.config.option
    if chosen.markexpr == "not soak" and not chosen.collectonly:
        LEFT_OUT.write()
        for line in LEFT_OUT.lines():
            terminalreporter.write_line(line)
    skipped = [one for one in terminalreporter.stats.get("skipped", ()) if "browser" in one.nodeid.split("/")]
    if skipped:
        line = f"{len(skipped)} BROWSER TESTS ARE SKIPPED: the page was not tested (BROWSER=demand fails instead)"
        terminalreporter.write_line(f"*** {line} ***", red=True, bold=True)


class _NONE:
    id = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for item in (one for one in items if not one.get_closest_marker("soak")):
        # What such a test shows does not depend on the database; `make soak` runs it on the other one too.
        shared, sampled = item.get_closest_marker("mostly_sqlite"), item.get_closest_marker("sampled")
        if shared and "postgresql" in getattr(item, "callspec", _NONE).id:
            if not shared.args or not _is_chosen(item, shared, seen):
                item.add_marker(pytest.mark.soak)
        elif sampled and not _is_chosen(item, sampled, seen):
            item.add_marker(pytest.mark.soak)
    _thin_out([one for one in items if not one.get_closest_marker("soak")])
    soaked = [bool(item.get_closest_marker("soak")) for item in items]
    LEFT_OUT.count(
        run=[item.nodeid for item, left in zip(items, soaked, strict=True) if not left],
        left=[item.nodeid for item, left in zip(items, soaked, strict=True) if left],
    )

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


def _thin_out(items: list[pytest.Item]) -> None:
    """Of tests with many cases that pass the same code, some; unless all of them are what the test is about."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name in THINNED and not item.get_closest_marker("whole"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for some in cases.values():
        # One suite for both databases: of the second run of it a half, since what they do differently is little.
        pairs = len(some) <= MANY and some[0].path.parent.name == "contract"
        for item in some if pairs else ():
            if "postgresql" in getattr(item, "callspec", _NONE).id and crc32(item.nodeid.encode()) % 2:
                item.add_marker(pytest.mark.soak)
        each = 5 if len(some) > VERY_MANY else 3 if len(some) > MANY else 1
        for item in some[1:]:
            # By its name, so that no kind of case, such as a database, is always left out.
            if crc32(item.nodeid.encode()) % each:
                item.add_marker(pytest.mark.soak)


def _is_chosen(item: pytest.Item, marker: pytest.Mark, seen: Counter[tuple[str, str]]) -> bool:
    """Of the cases of one test each Nth, the first one too."""
    name = (item.nodeid.partition("[")[0], marker.name)
    seen[name] += 1
    return (seen[name] - 1) % int(marker.args[0]) == 0


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    # Root starts the server as a user of its own. The folder that all runs of pytest share is closed to other
    # users by the next run that begins, and a server below it would die: it gets a folder that no other run touches.
    base = tmp_path_factory.getbasetemp()
    shared = any(part.startswith("pytest-of-") for part in base.parts)
    with (
        tempfile.TemporaryDirectory(prefix="floodmark-pg-", dir=None if shared else base) as folder,
        postgres_server(Path(folder)) as server,
    ):
        yield server


@dataclass(frozen=True)
class Place:
    """Where a lake is: enough for another process to open it."""

    path: str
    catalog: str | None

    def open(self, **options: Any) -> fm.Lake:
        return fm.open(self.path, catalog=self.catalog, **options)


@pytest.fixture
def new_place(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Place]:
    count = iter(range(1_000_000))

    def make(database: str) -> Place:
        catalog = None
        if database == "postgresql":
            server: PostgresServer = request.getfixturevalue("postgres")
            catalog = server.url(server.new_database())
        return Place(str(tmp_path / f"lake{next(count)}"), catalog)

    return make


@pytest.fixture(params=DATABASES)
def place(request: pytest.FixtureRequest, new_place: Callable[[str], Place]) -> Place:
    """A place for a lake, on every database in turn."""
    return new_place(request.param)


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    """A lake with two empty tables, events and notes, on every database in turn."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        yield lake


def ids(lake: fm.Lake, table: str = "events", version: int | None = None) -> list[int]:
    """The ids in a table, read from its files by PyArrow: what is really there, without Spark."""
    import pyarrow.parquet as pq

    state = lake.catalog.history.tables_at(lake.catalog.history.resolve(version=version))
    found: list[int] = []
    for path in lake.catalog.files.data_files(state[table]):
        with lake.catalog.storage.open_input(path) as file:
            found += pq.ParquetFile(file).read(["id"], use_threads=False)["id"].to_pylist()
    return sorted(found)


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"row {number}"} for number in numbers]


@contextmanager
def at(point: str, act: Callable[[], object]) -> Iterator[None]:
    """Act once in the middle of an operation of this process, when the failpoint is passed; it has to be."""
    waiting = [act]

    def observe(name: str) -> None:
        if name == point and waiting:
            waiting.pop()()

    failpoints.observer = observe
    try:
        yield
    finally:
        failpoints.observer = None
    assert not waiting, f"{point} was never passed"
