"""Settings: `floodmark.toml`, few keys, each with a default. An unknown key is an error that names the nearest.

Every error that can be detected without a lake is raised when the file is read, with file, line and column, before
anything starts. serve/daemon/declaration.py checks what needs the packages above (tables, kinds of sinks, what the lake
has), with the same places. No secret is a setting, and a value that may be one by mistake is never shown (I18).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from floodmark import clock
from floodmark.errors import Invalid, NotFound
from floodmark.json_form import Json, JsonObject
from floodmark.settings.places import NO_TEXT, TomlText, where_stopped

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FILE_NAME = "floodmark.toml"
# In place of a span of time: the daemon does not do it by itself.
OFF = "off"
LAKE_VARIABLE = "FLOODMARK_LAKE"
CATALOG_VARIABLE = "FLOODMARK_CATALOG"


@dataclass(frozen=True)
class LakeSettings:
    path: str | None = None
    catalog: str | None = None

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class MaintainSettings:
    """The defaults of maintenance, and the thresholds from which `status` reports it as due."""

    # How many small files of a partition are worth a rewrite.
    compact_files: int = 32
    # The window: how long versions can be read.
    keep_versions: str = "7d"
    # How long readers of an expired version still find its files.
    grace: str = "24h"
    # How often the daemon does all of it; "off": never.
    every: str = "10m"

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class TokenSettings:
    """A token that callers may use: its hash, and its role. Never the token itself (I18)."""

    sha256: str
    role: Literal["read", "write", "admin"]

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class ServeSettings:
    """Where `floodmark run` serves, and whom; where rows wait that are durable and not committed yet."""

    bind: str = "127.0.0.1:8787"
    # The hash of a token that may do everything; several with roles are [serve.tokens.NAME].
    token_sha256: str | None = None
    # A folder on a disk of this machine; by default inside the lake's folder, if that is one.
    spool: str | None = None
    # How long work under way may take after a signal; what takes longer is cut off.
    drain: str = "20s"
    tokens: dict[str, TokenSettings] = field(default_factory=dict)

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    @property
    def drain_s(self) -> float:
        return clock.parse_duration_ms(self.drain) / 1000


@dataclass(frozen=True)
class SourceSettings:
    """A source: a folder for dropped files."""

    type: Literal["files"]
    path: str
    table: str
    # By default by the ending of each file's name.
    format: Literal["jsonl", "ndjson", "json", "csv", "parquet"] | None = None
    # By default merge into a table with a key, append to others.
    mode: Literal["append", "merge"] | None = None
    every: str = "5s"
    # A file that has not changed for so long is complete.
    settle: str = "2s"

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class JobsSettings:
    # Whether the daemon resumes backfills whose process died, or that failed for a reason that may pass.
    resume: bool = True
    # How long a backfill that follows its source, and the daemon, retry when a service is unreachable.
    give_up: str = "1d"

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class Settings:
    lake: LakeSettings = field(default_factory=LakeSettings)
    maintain: MaintainSettings = field(default_factory=MaintainSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    jobs: JobsSettings = field(default_factory=JobsSettings)
    # master, stall (how long a job may wait for an executor), and any spark.* key as it is.
    spark: dict[str, str] = field(default_factory=dict)
    # endpoint, region and the like for object stores; credentials come from the environment.
    storage: dict[str, str] = field(default_factory=dict)
    # Sources by name.
    sources: dict[str, SourceSettings] = field(default_factory=dict)
    # Sinks by name: type, tables, and the settings of that kind, which are checked when the sink is added.
    sinks: dict[str, JsonObject] = field(default_factory=dict)
    # Tables as code by name: columns, key and the rest, which are checked when they are planned (docs/schema.md).
    tables: dict[str, JsonObject] = field(default_factory=dict)

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    @property
    def text(self) -> TomlText:
        """The text that they were read from: later errors name their place as well."""
        found: TomlText = self.__dict__.get("_text", NO_TEXT)
        return found


# The sections whose keys are names.
Section = LakeSettings | MaintainSettings | ServeSettings | JobsSettings
SECTIONS: Mapping[str, type[Section]] = {
    "lake": LakeSettings,
    "maintain": MaintainSettings,
    "serve": ServeSettings,
    "jobs": JobsSettings,
}
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
# The record of an entry, for sections with names of the user's own.
_ENTRIES: Mapping[str, type[SourceSettings | TokenSettings]] = {"sources": SourceSettings, "tokens": TokenSettings}


def load_settings(path: Path | None = None) -> Settings:
    """The settings of a file; without one, floodmark.toml of this folder if it exists, else the defaults."""
    if path is None:
        path = Path(FILE_NAME)
        if not path.exists():
            return Settings()
    elif not path.exists():
        raise NotFound("there is no such settings file", path=path)
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place, problem = where_stopped(error, text)
        at = f"{path}:{place.line}:{place.column}"
        raise Invalid("the settings file is not valid TOML", file=at, problem=problem) from error
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid("the settings file cannot be read", file=path, cause=error) from error
    return check_settings(data, str(path), text)


def check_settings(data: Mapping[str, Json], origin: str, text: str = "") -> Settings:
    """The settings in the data of a file; `text` is that of the file, for the places of errors."""
    # Late: a command without a settings file does not wait for this import.
    from pydantic import TypeAdapter, ValidationError

    places = TomlText(text, origin)
    texts: dict[str, dict[str, str]] = {}
    for name in ("spark", "storage"):
        section = data.get(name, {})
        if not isinstance(section, Mapping):
            raise wrong_setting(name, f"a section: [{name}]", places)
        texts[name] = {key: _text(value) for key, value in _flat(section).items()}
    for key in texts["spark"]:
        if key not in ("master", "stall") and not key.startswith("spark."):
            known = ["spark.master", "spark.stall", "spark.spark.…"]
            raise unknown_key(f"spark.{key}", known, places.where(f"spark.{key}"))
    try:
        settings = TypeAdapter(Settings).validate_python({**data, **texts})
    except ValidationError as error:
        unknown = [one for one in error.errors() if one["type"] in _UNKNOWN]
        # A misspelt key is missing too: an error about its own name is more useful.
        first = (unknown or error.errors())[0]
        name = ".".join(map(str, first["loc"]))
        if unknown:
            raise unknown_key(name, _known_beside(first["loc"]), places.where(first["loc"])) from error
        raise Invalid(
            "a setting is missing" if first["type"].startswith("missing") else "invalid setting",
            setting=name,
            problem=first["msg"],
            file=places.where(first["loc"], value=True),
        ) from error
    _check_values(settings, places)
    settings.__dict__["_text"] = places
    return settings


def _known_beside(loc: Sequence[int | str]) -> list[str]:
    """The keys that are valid in place of an unknown one."""
    kind: type[DataclassInstance] = Settings
    for name in loc[:-1]:
        if name in _ENTRIES and kind in (Settings, ServeSettings):
            kind = _ENTRIES[str(name)]
        elif kind is Settings:
            kind = SECTIONS.get(str(name), Settings)
    return [one.name for one in fields(kind)]


def _check_values(settings: Settings, places: TomlText) -> None:
    """Raised when the file is read, not in the middle of a run."""
    if settings.maintain.compact_files < 2:
        raise wrong_setting("maintain.compact_files", "at least 2", places)
    spans = {f"maintain.{name}": getattr(settings.maintain, name) for name in ("keep_versions", "grace")}
    for name, source in settings.sources.items():
        spans[f"sources.{name}.settle"] = source.settle
        check_every(f"sources.{name}.every", source.every, places)
        if not source.path or not source.table:
            raise wrong_setting(f"sources.{name}.{'table' if source.path else 'path'}", "not empty", places)
    for setting, text in {**spans, "serve.drain": settings.serve.drain, "jobs.give_up": settings.jobs.give_up}.items():
        _check_span(setting, text, places)
    check_every("maintain.every", settings.maintain.every, places)
    stall = settings.spark.get("stall", "1s")
    if (int(stall) if stall.isdecimal() else _check_span("spark.stall", stall, places)) <= 0:
        raise wrong_setting("spark.stall", "seconds, or a duration like 5m, above zero", places)
    for name, section in settings.sinks.items():
        check_every(f"sinks.{name}.every", section.get("every", OFF), places)
    hashes = {f"serve.tokens.{name}.sha256": token.sha256 for name, token in settings.serve.tokens.items()}
    if settings.serve.token_sha256 is not None:
        hashes["serve.token_sha256"] = settings.serve.token_sha256
    for setting, text in hashes.items():
        if not _SHA256.fullmatch(text):
            # Not shown: it may be the token itself.
            raise wrong_setting(setting, "64 hexadecimal digits; `floodmark run --new-token` creates a token", places)


def check_every(setting: str, text: Json, places: TomlText) -> None:
    """An interval: a span of time above zero, or off."""
    if text != OFF and _check_span(setting, text, places) <= 0:
        raise wrong_setting(setting, f'a duration above zero, or "{OFF}"', places)


def _check_span(setting: str, text: Json, places: TomlText) -> int:
    if not isinstance(text, str):
        raise wrong_setting(setting, "a duration is a text like 10s", places)
    try:
        return clock.parse_duration_ms(text)
    except Invalid as error:
        raise wrong_setting(setting, str(error), places) from error


def wrong_setting(name: str, problem: str, places: TomlText) -> Invalid:
    return Invalid("invalid setting", setting=name, problem=problem, file=places.where(name, value=True) or None)


def unknown_key(name: str, known: list[str], origin: str) -> Invalid:
    """The error for an unknown key; it names the nearest known one."""
    near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1, cutoff=0.0)
    return Invalid(
        "there is no such setting", setting=name, file=origin, advice=f"Did you mean {near[0]}?" if near else ""
    )


def _flat(section: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """TOML reads `spark.sql.x = 1` as nested tables; Spark's keys have dots."""
    flat: dict[str, Json] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _text(value: Json) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_settings_file(path: str | os.PathLike[str]) -> bool:
    """Whether this names a settings file rather than a lake: by its ending, unless it is a folder."""
    return os.fspath(path).endswith(".toml") and not os.path.isdir(path)


def find_lake(given: str | None, settings: Settings, *, named: bool) -> str:
    """The lake to use: as given, else by the settings file that was `named`, the environment, a file found.

    A name that the user gives takes precedence over the environment; a file that merely exists does not.
    """
    path = given or _first(settings.lake.path, os.environ.get(LAKE_VARIABLE), named)
    if not path:
        raise Invalid("no lake was named", advice=f"Use --lake PATH, {LAKE_VARIABLE}, or [lake] path in {FILE_NAME}.")
    return path


def find_catalog(given: str | None, settings: Settings, *, named: bool) -> str | None:
    """The URL of the catalog to use, in the order of `find_lake`; None: SQLite in the lake's folder."""
    return given or _first(settings.lake.catalog, os.environ.get(CATALOG_VARIABLE), named)


def _first(in_file: str | None, in_environment: str | None, named: bool) -> str | None:
    return in_file or in_environment if named else in_environment or in_file
