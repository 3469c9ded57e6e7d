"""The other ends of sinks, one class per kind: where it is, what is there, and whether anything is left over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import floodmark as fm
from floodmark.sinks.files.units import MANIFEST, read_rows, read_units
from floodmark.storage import Storage, join, root_location
from floodmark.testing.children import Child, preload
from floodmark.testing.invariants import check_lake
from floodmark.testing.receiver import Receiver
from floodmark.testing.served import serve_at
from tests.crash.sink_world import EVENTS, PEOPLE, Contents, folded, make

preload("tests.crash.sink_ends", "floodmark.testing.served", "floodmark.ingest.receive")

_ALWAYS = ("held", "opened", "witnessed", "sealed", "acknowledged", "shipped", "settled")


class End(Protocol):
    # What this end is, and what kind of sink ships to it.
    name: str
    kind: str
    # The failpoints that a run passes which ships something.
    points: frozenset[str]
    # What the sink is set to, and what it is set to while a unit is open.
    settings: dict[str, Any]
    other_settings: dict[str, Any]

    def contents(self) -> Contents:
        """What is there, each row as often as it is there."""

    def unit(self, table: str, number: int) -> Any:
        """All that tells one unit of a table from any other: names, boundaries and bytes, as far as there are any."""

    def check_clean(self, *, temporary: bool = True) -> None:
        """Nothing is there that a reader would never take; `temporary`: nor what writes that broke off left."""


def _points(*more: str) -> frozenset[str]:
    return frozenset(f"unit.{step}" for step in (*_ALWAYS, *more))


def _check_none(root: str, storage: Storage | None) -> None:
    left = [] if storage is None else [entry.location for entry in storage.list(root, temporary=True)]
    assert not left, f"broken writes left {left}"


class FilesEnd:
    name = kind = "files"
    points = _points("sent", "manifest")
    other_settings: dict[str, Any] = {"format": "parquet", "part_bytes": 8192}

    def __init__(self, folder: Path) -> None:
        self._path = str(folder)
        self._storage = Storage()
        self.settings: dict[str, Any] = {"path": self._path, "format": "jsonl", "part_bytes": 1024}

    def contents(self) -> Contents:
        found = {}
        for table in (EVENTS, PEOPLE):
            units = read_units(self._path, table=table)
            assert all(before.until <= after.since for before, after in pairwise(units))
            rows = [row for unit in units for batch in read_rows(unit) for row in batch.to_pylist()]
            found[table] = folded(table, rows)
        return Contents(**found)  # type: ignore[arg-type]

    def unit(self, table: str, number: int) -> Any:
        unit = read_units(self._path, table=table)[number]
        return unit.since, unit.until, unit.version, unit.objects

    def check_clean(self, *, temporary: bool = True) -> None:
        root = root_location(self._path)
        _check_none(root, self._storage if temporary else None)
        named = {join(unit.folder, name) for unit in read_units(root) for name in (MANIFEST, *_names(unit))}
        there = {entry.location for entry in self._storage.list(root)}
        assert there == named, f"left over: {there - named}, missing: {named - there}"


def _names(unit: Any) -> Iterator[str]:
    return (one.name for one in unit.objects)


class HttpEnd:
    """A receiver in this process, which outlives the one that is killed."""

    name = kind = "http"
    points = _points("sent")
    other_settings: dict[str, Any] = {"part_rows": 9, "compression": "zstd", "parallel": 1}

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.settings: dict[str, Any] = {
            "url": f"{receiver.url}/{{table}}",
            "part_rows": 4,
            "parallel": 2,
            "backoff_s_max": 0.01,
        }

    def contents(self) -> Contents:
        found: dict[str, list[dict[str, Any]]] = {EVENTS: [], PEOPLE: []}
        kept = {
            request.key: request for request in self.receiver.requests if request.key in self.receiver.ledger.digests
        }
        for request in kept.values():
            found[request.path.strip("/")] += request.rows
        assert sum(map(len, found.values())) == len(self.receiver.rows)
        # A unit has each key once, and its parts come in any order.
        found[PEOPLE].sort(key=lambda row: int(row["_seq"]))
        return Contents(**{table: folded(table, rows) for table, rows in found.items()})  # type: ignore[arg-type]

    def unit(self, table: str, number: int) -> Any:
        requests = [request for request in self.receiver.requests if request.path.strip("/") == table]
        units = sorted({request.headers["floodmark-unit"] for request in requests}, key=_unit_order)
        mine = [request for request in requests if request.headers["floodmark-unit"] == units[number]]
        return units[number], {(request.part, request.digest) for request in mine}

    def check_clean(self, *, temporary: bool = True) -> None:
        assert self.receiver.ledger.mismatched == []


def _unit_order(text: str) -> int:
    return int(text.partition("..")[2])


class IcebergEnd:
    name = kind = "iceberg"
    points = _points("staged", "committed")
    other_settings: dict[str, Any] = {"compact_file_count": 5}

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        uri = f"sqlite:///{folder}/catalog.db"
        self._catalog = {"name": "others", "type": "sql", "uri": uri, "warehouse": f"file://{folder}/warehouse"}
        self.settings: dict[str, Any] = {"catalog": self._catalog, "namespace": "other"}

    def contents(self) -> Contents:
        return Contents(**{name: self._rows(name) for name in (EVENTS, PEOPLE)})  # type: ignore[arg-type]

    def unit(self, table: str, number: int) -> Any:
        snapshots = [one.snapshot_id for one in self._table(table).snapshots()]
        return self._rows(table, snapshots[number])

    def check_clean(self, *, temporary: bool = True) -> None:
        for name in (EVENTS, PEOPLE):
            if self._exists(name):
                self._check_table(name, temporary)

    def _check_table(self, name: str, temporary: bool) -> None:
        table, storage = self._table(name), Storage()
        named: set[str] = set()
        for snapshot in table.snapshots():
            named.add(snapshot.manifest_list)
            for manifest in snapshot.manifests(table.io):
                named.add(manifest.manifest_path)
                named |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
        root = root_location(table.location())
        # The table's own metadata files are its catalog's, also those that it did not come to write.
        _check_none(join(root, "data"), storage if temporary else None)
        there = {entry.location for entry in storage.list(root) if not entry.location.endswith(".metadata.json")}
        known = {root_location(location) for location in named}
        assert there == known, f"left over: {there - known}, missing: {known - there}"

    def _rows(self, name: str, snapshot: int | None = None) -> Counter[tuple[int, str]] | dict[int, str]:
        if not self._exists(name):
            return folded(name, [])
        rows = self._table(name).scan(snapshot_id=snapshot).to_arrow().to_pylist()
        if name == PEOPLE:
            assert len({row["id"] for row in rows}) == len(rows)
        return folded(name, ({**row, "_change": "upsert"} for row in rows))

    def _open(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog(**self._catalog)

    def _exists(self, name: str) -> bool:
        return bool(self._open().table_exists(("other", name)))

    def _table(self, name: str) -> Any:
        return self._open().load_table(("other", name))


class LakeEnd:
    """Another lake, served by a process of its own."""

    name, kind = "lake", "http"
    points = HttpEnd.points
    other_settings: dict[str, Any] = {"part_rows": 9, "compression": "none"}

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._path, self._address = str(folder / "lake"), folder / "address"
        with fm.open(self._path, create=True) as lake:
            make(lake)
        self.serve("127.0.0.1:0")
        url = f"{self._address.read_text()}/api/tables/{{table}}/rows"
        self.settings: dict[str, Any] = {"url": url, "part_rows": 4, "parallel": 2, "backoff_s_max": 0.05, "tries": 12}

    def serve(self, bind: str) -> None:
        self._address.unlink(missing_ok=True)
        self._server = Child(serve_at, self._path, bind, str(self._address))
        deadline = time.monotonic() + 60
        while not self._address.exists():
            assert self._server.process.is_alive(), "the server has ended"
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def kill(self) -> None:
        self._server.process.kill()
        self._server.wait()

    def restart(self) -> None:
        """Killed, and there again at the same address."""
        bind = self._address.read_text().removeprefix("http://")
        self.kill()
        self.serve(bind)

    def contents(self) -> Contents:
        with fm.open(self._path, read_only=True) as lake:
            found = {name: lake.read_arrow(name).read_all().to_pylist() for name in (EVENTS, PEOPLE)}
        for row in (*found[EVENTS], *found[PEOPLE]):
            row["_change"] = "upsert"
        assert len({row["id"] for row in found[PEOPLE]}) == len(found[PEOPLE])
        return Contents(**{name: folded(name, rows) for name, rows in found.items()})  # type: ignore[arg-type]

    def unit(self, table: str, number: int) -> Any:
        """A lake keeps no units: it refuses parts that do not fit to those that it has."""

    def check_clean(self, *, temporary: bool = True) -> None:
        # What a killed sender had under way may still come to its end, as something that is there already.
        self._server.process.terminate()
        self._server.wait()
        with fm.open(self._path) as lake:
            check_lake(lake.catalog)
        self.serve(self._address.read_text().removeprefix("http://"))


NewEnd = Callable[[str], End]


@contextmanager
def ends(folder: Path) -> Iterator[NewEnd]:
    """Makes other ends by their names, as many as are asked for."""
    receivers: list[Receiver] = []
    lakes: list[LakeEnd] = []

    def make_end(name: str) -> End:
        place = folder / f"end-{len(list(folder.glob('end-*')))}"
        if name == "files":
            place.mkdir()
            return FilesEnd(place)
        if name == "iceberg":
            return IcebergEnd(place)
        if name == "lake":
            lakes.append(LakeEnd(place))
            return lakes[-1]
        receivers.append(Receiver().__enter__())
        return HttpEnd(receivers[-1])

    try:
        yield make_end
    finally:
        for receiver in receivers:
            receiver.__exit__(None, None, None)
        for lake in lakes:
            lake.kill()
