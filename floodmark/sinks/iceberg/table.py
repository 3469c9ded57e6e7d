"""A table in another Iceberg catalog, as a sink finds it: its location, its state, and the last unit it records.

The last unit that a sink sent is a property of the table, set in the commit of the rows themselves (I9): so the table
alone shows whether it has a unit, even if the reply was lost. Between two reads only files that never change are
cached. Failure model: a catalog or store that does not answer is Unavailable; a table that Floodmark cannot write to
without damage (delete files, another format, unsupported columns) is Invalid; a table that is not in the state in which
its sink left it is Corrupt, and nothing is sent until an operator chooses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    NoSuchNamespaceError,
    NoSuchPropertyException,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import ManifestContent, ManifestFile, read_manifest_list
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot, ancestors_of
from pyiceberg.transforms import UnknownTransform
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from floodmark.commit.live_files import LiveFile
from floodmark.commit.metadata import MetadataFiles
from floodmark.errors import Corrupt, Invalid, NotFound, Unavailable
from floodmark.model import SEQ_COLUMN
from floodmark.rows.layout import partition_spec
from floodmark.rows.primitives import TIMES
from floodmark.rows.schema import check_columns, table_schema, user_fields
from floodmark.sinks.settings import IcebergSettings, WrongSetting
from floodmark.storage import Storage, join
from floodmark.storage.fileio import LakeFileIO, with_options

FORMAT_VERSION = 2
# Tables of a SQL catalog belong to a named catalog; this is PyIceberg's own default.
_CATALOG = "default"
# Metadata goes through our storage too: durable before the catalog names it (I4).
_FILE_IO = "floodmark.storage.fileio.LakeFileIO"
_PY_IO_IMPL = "py-io-impl"
_NOT_OPENED = (
    ValueError,
    ArgumentError,
    NoSuchModuleError,
    ModuleNotFoundError,
    NoSuchPropertyException,
    NotInstalledError,
)
# Each unit makes a metadata file: Iceberg's own rule deletes the oldest as new ones are added.
_METADATA_RULES = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}


@dataclass(frozen=True)
class SentUnit:
    """The last unit of a sink that a table has, from the table's own property."""

    lake: str
    epoch: int
    since: int
    until: int
    unit: str
    attempt: str
    snapshot: int
    sequence: int
    rows: int = 0
    deletions: int = 0
    bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, table: str) -> SentUnit:
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise Corrupt(
                "the destination's record of what was sent to it cannot be parsed",
                table=table,
                cause=error,
                advice="Another Floodmark may have written it: use that version, or ship to another table.",
            ) from error


@dataclass(frozen=True)
class IcebergState:
    """The table at one moment."""

    table: Table
    files: MetadataFiles

    @property
    def name(self) -> str:
        return ".".join(self.table.name())

    @property
    def metadata(self) -> TableMetadata:
        return self.table.metadata

    @property
    def id(self) -> str:
        return str(self.metadata.table_uuid)

    @property
    def head(self) -> Snapshot | None:
        return self.metadata.current_snapshot()

    @property
    def data_folder(self) -> str:
        return self.metadata.properties.get("write.data.path", join(self.metadata.location, "data"))

    @property
    def metadata_folder(self) -> str:
        return self.metadata.properties.get("write.metadata.path", join(self.metadata.location, "metadata"))

    @property
    def collects(self) -> bool:
        """Whether the table's owner allows its files to be deleted."""
        return self.metadata.properties.get("gc.enabled", "true").lower() != "false"

    def sent(self, name: str) -> SentUnit | None:
        text = self.metadata.properties.get(name)
        return None if text is None else SentUnit.from_json(text, self.name)

    def manifests(self) -> tuple[ManifestFile, ...]:
        return () if self.head is None else manifests_of(self.files, self.head, self.name)

    def live(self) -> list[LiveFile]:
        manifests = self.manifests()
        with answering("the destination's storage"):
            return [
                LiveFile(entry.data_file, entry.sequence_number, None)
                for manifest in manifests
                for entry in self.files.entries(manifest)
            ]

    def went_back(self, sent: SentUnit) -> bool:
        """Whether the table's lineage certainly lacks the snapshot that brought the unit."""
        for snapshot in ancestors_of(self.head, self.metadata):
            if snapshot.snapshot_id == sent.snapshot:
                return False
            if (snapshot.sequence_number or 0) < sent.sequence:
                return True
        # Only newer snapshots remain in the lineage: the older ones were expired.
        return self.head is None


def unit_property(sink_id: str, table_id: str) -> str:
    """The property that holds the last unit; one per sink and table of the lake: several may ship into one table."""
    return f"floodmark.{sink_id}.{table_id}"


def read_manifests(files: MetadataFiles, snapshot: Snapshot) -> tuple[ManifestFile, ...]:
    with answering("the destination's storage"):
        return tuple(read_manifest_list(files.io.new_input(snapshot.manifest_list)))


def manifests_of(files: MetadataFiles, snapshot: Snapshot, table: str) -> tuple[ManifestFile, ...]:
    """The manifests of a snapshot; Invalid if some list deleted rows, which copying files would bring back."""
    manifests = read_manifests(files, snapshot)
    if any(manifest.content == ManifestContent.DELETES for manifest in manifests):
        raise Invalid(
            "the destination's table has delete files, which Floodmark does not write beside",
            table=table,
            snapshot=snapshot.snapshot_id,
            advice="Another engine wrote them; rewrite the table there as copy-on-write, then run the sink again.",
        )
    return manifests


class IcebergPlace:
    """The other catalog, and the storage of its tables."""

    def __init__(self, settings: IcebergSettings, storage: Storage) -> None:
        self._settings = settings
        # The lake's own storage settings are the default for those of the catalog: a destination in the same store must
        # not be searched in the public cloud.
        own_properties = with_options(settings.catalog_properties(), storage.options)
        self._properties = {_PY_IO_IMPL: _FILE_IO, **own_properties}
        self._name = self._properties.pop("name", _CATALOG)
        # The endpoint and region of the catalog's properties, for PyIceberg's metadata and for our files alike.
        own = LakeFileIO(self._properties).storage if self._properties[_PY_IO_IMPL] == _FILE_IO else storage
        self.storage = storage if own.options == storage.options else own
        self.files = MetadataFiles(self.storage)

    @cached_property
    def catalog(self) -> Catalog:
        try:
            with answering("the destination's catalog"):
                return load_catalog(self._name, **self._properties)
        except _NOT_OPENED as error:
            # Its text may hold the whole address: the kind of error is enough (I18).
            raise WrongSetting(
                "the destination's catalog cannot be opened",
                option="--catalog KEY=VALUE",
                type=self._properties.get("type"),
                cause=error,
                advice="Look at the sink's setting `catalog`: it takes PyIceberg's catalog properties.",
            ) from error

    def close(self) -> None:
        """Close the catalog's connections; the next call opens it again."""
        catalog = self.__dict__.pop("catalog", None)
        if catalog is not None:
            catalog.close()

    def identifier(self, table: str) -> tuple[str, ...]:
        return (*self._settings.namespace.split("."), self._settings.table.replace("{table}", table))

    def load(self, table: str) -> IcebergState | None:
        """The current state of the table, or None if it does not exist; Invalid if it cannot be written to."""
        try:
            with answering("the destination's catalog"):
                found = self.catalog.load_table(self.identifier(table))
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        except ValueError as error:
            # PyIceberg raises this for metadata that it cannot interpret.
            name = ".".join(self.identifier(table))
            raise Corrupt("the destination's table cannot be understood", table=name, cause=error) from error
        state = IcebergState(found, self.files)
        _check_usable(state)
        return state

    def create(self, table: str, columns: pa.Schema, key: Sequence[str]) -> IcebergState:
        """Create the table, empty. Crash here: an empty table without a record of any unit; the next try fills it."""
        identifier = self.identifier(table)
        hidden = table_schema(columns, key)
        schema = Schema(*user_fields(hidden), identifier_field_ids=hidden.identifier_field_ids)
        chosen = self._settings.partition
        spec = partition_spec(schema, _by_day(schema) if chosen is None else chosen)
        with answering("the destination's catalog"):
            self.catalog.create_namespace_if_not_exists(identifier[:-1])
            # This assigns new field ids: the caller reads the table that was created, or that existed.
            properties = {"format-version": str(FORMAT_VERSION), **_METADATA_RULES}
            with suppress(TableAlreadyExistsError):
                self.catalog.create_table(identifier, schema, partition_spec=spec, properties=properties)
        state = self.load(table)
        if state is None:
            raise Unavailable("the destination's table is missing after it was created", table=".".join(identifier))
        return state


@contextmanager
def answering(who: str) -> Iterator[None]:
    """Turn errors of a foreign catalog or store that did not answer into Unavailable."""
    try:
        yield
    except (ArgumentError, NoSuchModuleError):
        raise
    except (NotFound, FileNotFoundError) as error:
        raise Corrupt(
            "a file of the destination's table is gone",
            cause=error,
            advice="Restore it, or create the table again and open a new epoch with `floodmark sink replay`.",
        ) from error
    except (OSError, SQLAlchemyError, RESTError) as error:
        # A driver's text may hold the address that it was given, with its password: the kind of error is enough.
        raise Unavailable(
            f"{who} did not answer", cause=error, advice="The next run continues where this one stopped."
        ) from error


def _by_day(schema: Schema) -> tuple[str, ...]:
    """By day of the first time column; unpartitioned if it has none, or if that name is taken."""
    first = next((field.name for field in schema.fields if isinstance(field.field_type, TIMES)), None)
    return () if first is None or f"{first}_day" in schema.column_names else (f"day(`{first}`)",)


def _check_usable(state: IcebergState) -> None:
    metadata, schema = state.metadata, state.metadata.schema()
    if metadata.format_version != FORMAT_VERSION:
        raise Invalid(
            "the destination's table has another format than Floodmark writes",
            table=state.name,
            format_version=metadata.format_version,
            format_version_wanted=FORMAT_VERSION,
            advice="Ship to another table, or change the format of this one.",
        )
    if any(field.name == SEQ_COLUMN for field in schema.fields):
        raise Invalid(
            "the destination's table belongs to a lake; only that lake may write to it",
            table=state.name,
            column=SEQ_COLUMN,
            advice="Ship to that lake with a sink of kind http, or to another table.",
        )
    check_columns(schema)
    columns = {field.field_id for field in schema.fields}
    for field in metadata.spec().fields:
        if field.source_id not in columns or isinstance(field.transform, UnknownTransform):
            raise Invalid("the destination's table has an unknown partition transform", partition=field.name)
