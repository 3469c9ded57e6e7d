"""A files sink: every unit is a folder of objects, and last a manifest. A unit is complete or does not count.

    look       the folders of this epoch show which units exist: none beyond the mark except this one, by its
               identity, and the last settled one; else Corrupt
    folder     its name consists of ids and the range alone: the same at every try
    seal       the pieces of a wave are recorded
    ship       their objects are put under unused names: in this process, or by Spark's tasks
    acknowledge
    manifest   when every piece exists, `_unit.json` names all objects; from then on the unit counts

A crash anywhere leaves whole objects without a manifest, which no reader reads. The next try continues at the pieces
that are not acknowledged, makes their objects again and finds them present: the same bytes or rows, or it stops (I8,
I9). A listing finds the objects that earlier tries and other machines wrote: a manifest never names an object that does
not exist.
How rows become objects is in floodmark/rows/reading/parts.py, how they are read in floodmark/sinks/files/units.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from floodmark.catalog.unit import ACKNOWLEDGED, SEALED, Part, Settled, Shipped, Unit, UnitLog, Watch
from floodmark.catalog.units import refill, rolled_back
from floodmark.errors import Corrupt, Unavailable
from floodmark.failpoints import hit
from floodmark.rows.session import Sessions
from floodmark.sinks.files.units import MANIFEST, FileUnit
from floodmark.sinks.settings import FilesSettings
from floodmark.storage import Storage, join, root_location

if TYPE_CHECKING:
    from floodmark.rows.reading.parts import PartObject, PartTarget
    from floodmark.rows.reading.shipment import Piece, Shipment

# What one acknowledgement covers. In this process by size; in Spark by how many tasks run at once, so that its cores
# seldom wait for the last task of a wave. A few pieces are one wave, without asking for the number of tasks.
HERE_BYTES = 16 * 1024 * 1024
WAVE_PIECES_MIN = 16
WAVE_ROUNDS = 4
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_")
_NAME_BYTES_MAX = 200

Objects = Mapping[int, tuple["PartObject", ...]]


def safe_name(name: str) -> str:
    """A name that every file system, object store and reader accepts unchanged, and that is unique to the given name.

    Lowercase letters, digits and underscores stay; every other character is written as its bytes, -xx. So names that
    differ only in case stay apart on a disk that ignores it, and no path contains what a decoder takes for an escape. A
    name too long for a disk is cut, and ends in -h and a digest.
    """
    safe = "".join(chr(byte) if byte in _PLAIN else f"-{byte:02x}" for byte in name.encode())
    if len(safe) <= _NAME_BYTES_MAX:
        return safe
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{safe[: _NAME_BYTES_MAX - len(digest) - 2]}-h{digest}"


def unit_folder(path: str, unit: Unit) -> str:
    """The folder of a unit. Ranges of one table sort by name: the first sequence is the one after `since`."""
    return join(epoch_folder(path, unit), _range_name(unit.since, unit.until))


def epoch_folder(path: str, unit: Unit) -> str:
    """The folder of the units of one table, sink and epoch."""
    return join(path, safe_name(unit.table), unit.table_id, f"{unit.lake}-{unit.sink_id}-e{unit.epoch}")


def _range_name(since: int, until: int) -> str:
    return f"{since + 1:020d}-{until:020d}"


class FilesDestination:
    """Ships units into a folder or bucket. `storage` is the lake's; the settings may give the destination its own."""

    def __init__(self, settings: FilesSettings, storage: Storage, sessions: Sessions) -> None:
        self._path = root_location(settings.path)
        self._lake = storage
        self._storage = Storage(settings.storage) if settings.storage else storage
        self._sessions = sessions

    def ship(self, unit: Unit, shipment: Shipment, log: UnitLog, watch: Watch) -> Shipped:
        """Write every row of the unit into its folder, and the manifest last. A unit without rows writes nothing."""
        # Imported late: a caller that only reads state does not wait for the code that moves rows.
        from floodmark.rows.reading.parts import PartTarget, cut_pieces, object_schema, objects_to_json

        rules = unit.rules
        folder = unit_folder(self._path, unit)
        target = PartTarget(folder, rules.format, rules.part_bytes, object_schema(shipment), self._storage.options)
        pieces = cut_pieces(shipment, rules.format, rules.part_bytes)
        self._look(unit, log)
        parts = {part.first: part for part in log.parts()}
        done = self._acknowledged(folder, parts, len(pieces))
        shipped, in_spark = Shipped(), False
        for wave in self._waves(shipment, [piece for piece in pieces if piece.number not in done]):
            watch.check()
            log.seal([_part(piece) for piece in wave.pieces if piece.number not in parts])
            # Crash here: pieces that have no objects yet.
            hit("unit.sealed")
            objects = self._write(wave, target, unit)
            # Crash here: whole objects that the catalog has not recorded; the next try finds them.
            hit("unit.sent")
            log.acknowledge([_part(piece, objects_to_json(objects[piece.number])) for piece in wave.pieces])
            hit("unit.acknowledged")
            done |= objects
            shipped, in_spark = _more(shipped, objects, watch), in_spark or wave.in_spark
        everything = tuple(one for number in sorted(done) for one in done[number])
        if in_spark and not _are_in(everything, self._sizes(folder)):
            raise Unavailable(
                "objects that Spark's tasks have written are not visible from here",
                folder=folder,
                advice="The sink's path must be the same location for every executor: a bucket, or a shared folder.",
            )
        self._finish(unit, shipment, folder, everything)
        return shipped

    def _look(self, unit: Unit, log: UnitLog) -> None:
        """Check that the destination holds what this catalog sent: nothing beyond the mark, and nothing lost."""
        root, own = epoch_folder(self._path, unit), unit_folder(self._path, unit)
        for entry in self._storage.list(root, after=f"{unit.since + 1:020d}"):
            if not entry.location.endswith(f"/{MANIFEST}"):
                continue
            there = FileUnit.from_json(entry.location.removesuffix(f"/{MANIFEST}"), self._storage.read(entry.location))
            if there.folder != own or there.unit != unit.id:
                raise rolled_back(unit, there.unit or there.folder, manifest=entry.location)
        self._check_units_exist(unit, root, log.settled_units())

    def _check_units_exist(self, unit: Unit, root: str, settled: Sequence[Settled]) -> None:
        """Check that nothing was lost. Consumers delete the oldest units and leave the newest: it proves the folder."""
        names = [_range_name(one.since, one.until) for one in settled]
        there = [self._storage.exists(join(root, name, MANIFEST)) for name in names]
        oldest = max((at for at, found in enumerate(there) if found), default=len(there))
        gone = [at for at, found in enumerate(there) if not found and at < oldest]
        if gone:
            until = settled[gone[-1]].since if any(there) else None
            raise Corrupt(
                "the sink's folder lost units that were written to it",
                sink=unit.sink,
                table=unit.table,
                folder=root,
                units=len(gone),
                newest=names[gone[0]],
                advice="Mount or restore the folder if it is another than before. Units are deleted from the oldest on,"
                f" and the newest one stays. {refill(unit.sink, unit.table, until)}",
            )

    def _acknowledged(self, folder: str, parts: Mapping[int, Part], pieces: int) -> dict[int, tuple[PartObject, ...]]:
        """The objects of pieces that need not be made again: acknowledged, and present in this folder.

        They are elsewhere if the sink was given another folder or bucket in the middle of the unit.
        """
        from floodmark.rows.reading.parts import objects_from_json

        if any(part.last != part.first + 1 or part.last > pieces for part in parts.values()):
            raise Corrupt("the parts of a unit are not the pieces of its files", folder=folder, pieces=pieces)
        done = {at: objects_from_json(part.detail) for at, part in parts.items() if part.state == ACKNOWLEDGED}
        there = self._sizes(folder) if any(done.values()) else {}
        return {number: objects for number, objects in done.items() if _are_in(objects, there)}

    def _sizes(self, folder: str) -> dict[str, int]:
        return {entry.location.removeprefix(f"{folder}/"): entry.size_bytes for entry in self._storage.list(folder)}

    def _waves(self, shipment: Shipment, pieces: Sequence[Piece]) -> Iterator[_Wave]:
        from floodmark.rows.reading.parts import task_slots

        if shipment.is_little:
            yield from _waves_here(pieces)
            return
        # Deletions are matched where the whole plan is available.
        rows = [piece for piece in pieces if not piece.has_deletions]
        size = WAVE_PIECES_MIN
        if len(rows) > size:
            size = max(size, WAVE_ROUNDS * task_slots(self._sessions.get()))
        for start in range(0, len(rows), size):
            yield _Wave(rows[start : start + size], in_spark=True)
        yield from _waves_here([piece for piece in pieces if piece.has_deletions])

    def _write(self, wave: _Wave, target: PartTarget, unit: Unit) -> Objects:
        from floodmark.rows.reading.parts import write_here, write_with_spark

        if not wave.in_spark:
            return write_here(wave.pieces, target, self._lake, self._storage)
        return write_with_spark(self._sessions.get(), wave.pieces, target, self._lake.options, f"floodmark-{unit.id}")

    def _finish(self, unit: Unit, shipment: Shipment, folder: str, objects: tuple[PartObject, ...]) -> None:
        if not objects:
            return
        complete = FileUnit(
            folder,
            unit.lake,
            unit.sink,
            unit.sink_id,
            unit.epoch,
            unit.table,
            unit.table_id,
            unit.version,
            unit.since,
            unit.until,
            unit.rules.format,
            tuple(shipment.schema.names),
            shipment.key,
            shipment.reading.shipped.model_dump_json(),
            objects,
            unit.id,
        )
        location, text = join(folder, MANIFEST), complete.to_json().encode()
        if not self._storage.put_if_absent(location, text):
            stored = FileUnit.from_json(folder, self._storage.read(location))
            # Another version may write the schema in another form.
            if stored.unit != complete.unit:
                raise rolled_back(unit, stored.unit or folder, manifest=location)
            if replace(stored, schema_json="") != replace(complete, schema_json=""):
                raise Corrupt(
                    "another unit exists at this location already",
                    manifest=location,
                    advice="Nothing was overwritten. Check which other process writes into this folder.",
                )
        # What failed tries left under temporary names; a process that still writes one writes an object that exists
        # already.
        for left in list(self._storage.list(folder, temporary=True)):
            self._storage.delete(left.location)
        # Crash here: the unit is complete and not settled; the next try finds everything present.
        hit("unit.manifest")


@dataclass(frozen=True)
class _Wave:
    """Pieces that are sealed, written and acknowledged together."""

    pieces: Sequence[Piece]
    in_spark: bool = False


def _waves_here(pieces: Sequence[Piece]) -> Iterator[_Wave]:
    wave: list[Piece] = []
    for piece in pieces:
        if wave and sum(one.size_bytes for one in wave) + piece.size_bytes > HERE_BYTES:
            yield _Wave(wave)
            wave = []
        wave = [*wave, piece]
    if wave:
        yield _Wave(wave)


def _are_in(objects: Sequence[PartObject], sizes: Mapping[str, int]) -> bool:
    return all(sizes.get(one.name) == one.size_bytes for one in objects)


def _part(piece: Piece, detail: str = "") -> Part:
    return Part(piece.number, piece.number + 1, state=ACKNOWLEDGED if detail else SEALED, detail=detail)


def _more(shipped: Shipped, objects: Objects, watch: Watch) -> Shipped:
    found = [one for of_piece in objects.values() for one in of_piece]
    rows, size_bytes = sum(one.rows for one in found), sum(one.size_bytes for one in found)
    watch.progress(rows, size_bytes)
    return Shipped(
        shipped.rows + rows,
        shipped.deletions + sum(one.deletions for one in found),
        shipped.size_bytes + size_bytes,
        shipped.parts + len(found),
    )
