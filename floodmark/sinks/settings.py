"""The settings of a sink: checked when it is added or changed, kept in the catalog, never with a secret in it (I18).

A setting that needs a secret names where to find it: `token_env`, `token_file`, or a value `env:NAME` in the properties
of an Iceberg catalog. An unknown setting is an error that names the nearest known one.

A section [sinks.NAME] of the settings file, and the options of the command line, hold texts: `read_section` and
`read_values` turn them into the values that are checked here.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from floodmark.catalog.unit import Rules
from floodmark.catalog.witness import place_digest
from floodmark.clock import parse_duration_ms
from floodmark.errors import Corrupt, Invalid
from floodmark.json_form import Json
from floodmark.model import MAIN
from floodmark.storage.options import checked

HTTP, FILES, ICEBERG = "http", "files", "iceberg"
NAME_BYTES_MAX = 200
_MIB = 1024 * 1024
_SIZE = re.compile(r"([0-9]{1,15}) *(?:([KMG])(i?))?B?", re.IGNORECASE)

# A setting before it is checked, as a caller gives it.
Setting: TypeAlias = "Json | os.PathLike[str]"


class WrongSetting(Invalid):
    """A setting of a sink is wrong, or names something that does not exist. `sink set` corrects it; open units
    continue.

    `option`: the option of `floodmark sink set` to use, if known.
    """

    def __init__(
        self, message: str, *, option: str, advice: str = "", **facts: str | int | BaseException | None
    ) -> None:
        self.option = option
        super().__init__(message, advice=advice, **facts)

    @property
    def kind(self) -> str:
        return Invalid.__name__  # the name that callers know

    def advise(self, sink: str) -> None:
        """Name the command that corrects it."""
        command = f"`floodmark sink set {sink} {self.option}`"
        self.advice = f"{self.advice} Correct it with {command}; the next run continues from here.".strip()


@dataclass(frozen=True)
class SinkSettings:
    """Settings that every kind of sink has: which rows it ships, and whether retention waits for it."""

    columns: tuple[str, ...] | None = None
    # A condition in Spark SQL that needs no Spark to evaluate, like: country = 'XX'.
    where: str | None = None
    protected: bool = True
    # The target size of a unit: it ends before the commit that would exceed it, and holds at least one commit.
    unit_rows: int = 20_000_000
    unit_bytes: int = 8 * 1024 * _MIB

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    def check(self) -> None:
        """Raise Invalid for every error that can be found without contacting the destination."""
        if self.columns is not None and not self.columns:
            raise _wrong("columns", "leave it out to take all columns")
        _check_least(self, unit_rows=1, unit_bytes=1)

    def rules(self) -> Rules:
        raise NotImplementedError

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True)
class HttpSettings(SinkSettings):
    """An endpoint that accepts NDJSON by POST; `{table}` in the address is the table's name."""

    kind: ClassVar[str] = HTTP

    url: str = ""
    token_env: str | None = None
    token_file: str | None = None
    compression: str = "gzip"
    part_rows: int = 5_000
    part_bytes: int = 4 * _MIB
    # Requests in flight at once.
    parallel: int = 4
    timeout_s: float = 30.0
    # How often a run sends one part before it gives up; the next run continues from there.
    tries: int = 8
    backoff_s_max: float = 30.0
    # An endpoint that asks for a longer wait ends the run.
    retry_after_s_max: float = 300.0
    # More refused rows than this in one unit point to a wrong address or schema, not to bad rows.
    quarantine_max: int = 1_000
    # The maximum over all tables and units, until an operator sends them again or drops them.
    quarantine_total_max: int = 10_000
    # A part that fails at every try without an answer about its rows (5xx, a timeout) is halved while others are
    # accepted. Halves have other keys, so rows may arrive twice at an endpoint that stored the part and did not confirm
    # it.
    split_unanswered: bool = False

    def check(self) -> None:
        super().check()
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _wrong("url", "an address like https://host/path")
        if parts.username or parts.password or _names_secret(parts.query):
            raise _wrong("url", "no user, password or key in it: name the token with token_env or token_file")
        if self.token_env and self.token_file:
            raise _wrong("token_file", "one of token_env and token_file")
        if self.compression not in ("gzip", "zstd", "none"):
            raise _wrong("compression", "gzip, zstd or none")
        _check_least(
            self, part_rows=1, part_bytes=1024, parallel=1, timeout_s=0.001, tries=1, backoff_s_max=0,
            retry_after_s_max=0, quarantine_max=0, quarantine_total_max=0,
        )  # fmt: skip

    def rules(self) -> Rules:
        return Rules(self.columns, self.where, "ndjson", self.compression, self.part_rows, self.part_bytes)


@dataclass(frozen=True)
class FilesSettings(SinkSettings):
    """A folder or bucket that gets objects, and last a manifest for every unit."""

    kind: ClassVar[str] = FILES

    path: str = ""
    format: str = "parquet"
    # A part is written from memory in one call, so this bounds the memory of a task.
    part_bytes: int = 64 * _MIB
    # endpoint, region and similar, if the bucket is not in the lake's store; credentials come from the environment.
    storage: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        super().check()
        if not self.path:
            raise _wrong("path", "a folder, or s3://bucket/prefix")
        if self.format not in ("parquet", "jsonl"):
            raise _wrong("format", "parquet or jsonl")
        checked(self.storage)
        _check_least(self, part_bytes=1024)

    def rules(self) -> Rules:
        return Rules(self.columns, self.where, self.format, "none", 2**31, self.part_bytes)


@dataclass(frozen=True)
class IcebergSettings(SinkSettings):
    """A table in another Iceberg catalog, by PyIceberg's catalog properties."""

    kind: ClassVar[str] = ICEBERG

    # type, uri, warehouse, …; a value `env:NAME` is read from the environment at each run.
    catalog: dict[str, str] = field(default_factory=dict)
    namespace: str = "default"
    # `{table}` is the table's name.
    table: str = "{table}"
    # For example ["day(ts)"]; None: by day of the first time column, if the table has one; []: not partitioned.
    partition: tuple[str, ...] | None = None
    # How many small files a partition needs before `maintain --sink NAME --compact` rewrites them.
    compact_file_count: int = 32
    # How long the destination keeps its snapshots, unless the table's own history.expire.* sets it.
    keep_snapshots: str = "7d"

    def check(self) -> None:
        super().check()
        if not self.catalog.get("type") and not self.catalog.get("uri"):
            raise _wrong("catalog", "PyIceberg's catalog properties, at least type or uri")
        for name, value in self.catalog.items():
            address = urlsplit(value)
            shown = address.password or _names_secret(address.query) or _is_secret(name)
            if shown and not value.startswith("env:"):
                raise _wrong(f"catalog.{name}", "a secret must be given as env:VARIABLE")
        parse_duration_ms(self.keep_snapshots)
        _check_least(self, compact_file_count=2)

    def rules(self) -> Rules:
        return Rules(self.columns, self.where, "iceberg", "none", 2**31, 2**62)

    def catalog_properties(self) -> dict[str, str]:
        """The catalog's properties, with values from the environment filled in."""
        return {name: from_environment(value, f"catalog.{name}") for name, value in self.catalog.items()}


KINDS: Mapping[str, type[HttpSettings | FilesSettings | IcebergSettings]] = {
    HTTP: HttpSettings,
    FILES: FilesSettings,
    ICEBERG: IcebergSettings,
}
AnySettings = HttpSettings | FilesSettings | IcebergSettings


def place_of(settings: AnySettings) -> str:
    """A digest of the sink's destination: the same for a sink that is added again for the same destination."""
    match settings:
        case HttpSettings():
            return place_digest(HTTP, settings.url)
        case FilesSettings():
            return place_digest(FILES, settings.path, settings.storage.get("endpoint"))
    there = [settings.catalog.get(name) for name in ("name", "uri", "warehouse")]
    return place_digest(ICEBERG, there, settings.namespace, settings.table)


def parse_settings(kind: str, values: Mapping[str, Setting]) -> AnySettings:
    """The settings of a sink of this kind; Invalid if one is unknown or wrong."""
    # Imported late: a command that only reads a size does not wait for it.
    from pydantic import TypeAdapter, ValidationError

    if kind not in KINDS:
        near = difflib.get_close_matches(kind, list(KINDS), n=1, cutoff=0.0)
        raise Invalid("unknown kind of sink", kind=kind, kinds=",".join(KINDS), advice=f"Is it {near[0]}?")
    known = [one.name for one in fields(KINDS[kind])]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise Invalid("there is no such setting", setting=name, kind=kind, advice=f"Did you mean {near[0]}?")
    try:
        settings: AnySettings = TypeAdapter(KINDS[kind]).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise _wrong(".".join(map(str, first["loc"])), first["msg"]) from error
    settings.check()
    return settings


def _is_secret(name: str) -> bool:
    """Whether a value of this name may be a secret; `header.…` of a REST catalog always counts as one."""
    words = ("secret", "password", "token", "credential", "key", "connection-string", "authorization", "sas", "sig")
    return name.lower().startswith("header.") or any(word in name.lower() for word in words)


def _names_secret(query: str) -> bool:
    return any(_is_secret(name) for name, _ in parse_qsl(query, keep_blank_values=True))


def settled_paths(values: Mapping[str, Setting]) -> dict[str, Setting]:
    """The same settings with absolute local paths: a run from another folder uses the same ones."""
    found = dict(values)
    for name in ("path", "token_file"):
        value = found.get(name)
        if isinstance(value, str | os.PathLike) and os.fspath(value) and "://" not in os.fspath(value):
            found[name] = os.path.abspath(os.path.expanduser(value))
    return found


def settings_from_json(kind: str, text: str) -> AnySettings:
    """Settings as the catalog stores them."""
    try:
        return parse_settings(kind, json.loads(text))
    except (ValueError, Invalid) as error:
        raise Corrupt(
            "the settings of a sink cannot be parsed", cause=error, advice="Set them again: `floodmark sink set`."
        ) from error


def from_environment(value: str, setting: str) -> str:
    if not value.startswith("env:"):
        return value
    found = os.environ.get(value.removeprefix("env:"))
    if found is None:
        key = setting.removeprefix("catalog.")
        raise WrongSetting(
            "a variable that a setting names is not set",
            option=f"--catalog {key}=env:VARIABLE",
            setting=setting,
            variable=value[4:],
            advice="Export it where the run starts, or name another one.",
        )
    return found


def check_name(name: str) -> None:
    """A sink's name is kept unchanged; it may be any text that every database and screen can show."""
    whole = isinstance(name, str) and bool(name) and name == name.strip() and name.isprintable()
    if not whole or len(name.encode(errors="replace")) > NAME_BYTES_MAX:
        raise Invalid(
            "invalid name of a sink",
            name=repr(name)[:80],
            advice=f"Use 1 to {NAME_BYTES_MAX} bytes of visible characters, without blanks around them.",
        )


def _check_least(settings: SinkSettings, **least: float) -> None:
    for name, value in least.items():
        if getattr(settings, name) < value:
            raise _wrong(name, f"at least {value}")


def _wrong(name: str, wanted: str) -> Invalid:
    return Invalid("a setting of the sink has the wrong form", setting=name, wanted=wanted)


# ── a section of the settings file ──


@dataclass(frozen=True)
class SinkSection:
    """A sink to be added. `every` is how often the daemon runs it; None if the section does not set it."""

    kind: str
    tables: list[str]
    settings: dict[str, Setting]
    branch: str | None = None
    every: str | None = None

    @property
    def line(self) -> str:
        return self.branch or MAIN


def read_section(section: Mapping[str, Json]) -> SinkSection:
    """Parse a section. It is not checked: `parse_settings` does that."""
    rest = dict(section)
    kind = str(rest.pop("type", ""))
    named, branch, every = rest.pop("tables", []), rest.pop("branch", None), rest.pop("every", None)
    tables = [named] if isinstance(named, str) else list(map(str, named)) if isinstance(named, Sequence) else []
    optional = [None if one is None else str(one) for one in (branch, every)]
    return SinkSection(kind, tables, read_values(rest), *optional)


def read_values(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Sizes as numbers, single names as lists."""
    read = dict(settings)
    for name, value in settings.items():
        if name.endswith("_bytes") and isinstance(value, str):
            read[name] = parse_size(name, value)
        elif name in ("columns", "partition") and isinstance(value, str):
            read[name] = [value]
    return read


def parse_size(name: str, text: str) -> int:
    """The bytes of a text like 4MiB, 256MB or 4194304."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise Invalid("invalid size", setting=name, value=repr(text), advice="Write it like 4MiB or 4194304.")
    number, prefix, binary = found.groups()
    power = 0 if prefix is None else "KMG".index(prefix.upper()) + 1
    size_bytes: int = int(number) * (1024 if binary else 1000) ** power
    return size_bytes
