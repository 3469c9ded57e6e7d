"""Settings: `floodmark.toml`, few keys, each with a default. An unknown key is an error that names the nearest."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from floodmark import clock
from floodmark.errors import Invalid, NotFound

FILE_NAME = "floodmark.toml"
LAKE_VARIABLE = "FLOODMARK_LAKE"
CATALOG_VARIABLE = "FLOODMARK_CATALOG"


@dataclass(frozen=True)
class LakeSettings:
    path: str | None = None
    catalog: str | None = None

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True)
class MaintainSettings:
    """What maintenance does when nobody says otherwise, and from when on `status` calls it due."""

    # How many small files of a partition are worth a rewrite.
    compact_files: int = 32
    # The window: how long versions can be read.
    keep_versions: str = "7d"
    # How long readers of an expired version still find its files.
    grace: str = "24h"

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True)
class ServeSettings:
    """Where `floodmark run` serves, and the hash of the token that writers must have; never the token itself (I18)."""

    bind: str = "127.0.0.1:8787"
    token_sha256: str | None = None

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True)
class Settings:
    lake: LakeSettings = field(default_factory=LakeSettings)
    maintain: MaintainSettings = field(default_factory=MaintainSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    # master, and any spark.* key as it is.
    spark: dict[str, str] = field(default_factory=dict)
    # endpoint, region and the like for object stores; credentials come from the environment.
    storage: dict[str, str] = field(default_factory=dict)
    # Ways out by name: type, tables, and the settings of that kind, which are checked when the sink is added.
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Tables as code by name: columns, key and the rest, which are checked when they are planned (docs/schema.md).
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


# The sections whose keys have names.
SECTIONS: Mapping[str, type[LakeSettings | MaintainSettings | ServeSettings]] = {
    "lake": LakeSettings,
    "maintain": MaintainSettings,
    "serve": ServeSettings,
}
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def load_settings(path: Path | None = None) -> Settings:
    """The settings of a file; without one, floodmark.toml of this folder if it is there, else the defaults."""
    if path is None:
        path = Path(FILE_NAME)
        if not path.exists():
            return Settings()
    elif not path.exists():
        raise NotFound("there is no such settings file", path=path)
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise Invalid("the settings file is not TOML", path=path, cause=error) from error
    return check_settings(data, str(path))


def check_settings(data: Mapping[str, Any], origin: str) -> Settings:
    # Late: a command without a settings file does not wait for it.
    from pydantic import TypeAdapter, ValidationError

    data = {**data, "spark": {key: _text(value) for key, value in _flat(data.get("spark", {})).items()}}
    data["storage"] = {key: _text(value) for key, value in _flat(data.get("storage", {})).items()}
    for key in data["spark"]:
        if key != "master" and not key.startswith("spark."):
            raise unknown_key(f"spark.{key}", ["spark.master", "spark.spark.…"], origin)
    try:
        settings = TypeAdapter(Settings).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            section = SECTIONS.get(str(first["loc"][0]), Settings) if len(first["loc"]) > 1 else Settings
            raise unknown_key(name, [one.name for one in fields(section)], origin) from error
        raise _wrong(name, first["msg"], origin) from error
    _check_maintain(settings.maintain, origin)
    if settings.serve.token_sha256 is not None and not _SHA256.fullmatch(settings.serve.token_sha256):
        # Not shown: it may be the token itself.
        raise _wrong("serve.token_sha256", "64 hexadecimal digits; `floodmark run --new-token` makes one", origin)
    return settings


def _check_maintain(settings: MaintainSettings, origin: str) -> None:
    """Said when the file is read, not in the middle of a run."""
    if settings.compact_files < 2:
        raise _wrong("maintain.compact_files", "at least two files make one", origin)
    for name in ("keep_versions", "grace"):
        try:
            clock.parse_duration_ms(getattr(settings, name))
        except Invalid as error:
            raise _wrong(f"maintain.{name}", str(error), origin) from error


def _wrong(name: str, problem: str, origin: str) -> Invalid:
    return Invalid("a setting has the wrong form", setting=name, problem=problem, file=origin)


def unknown_key(name: str, known: list[str], origin: str) -> Invalid:
    """There is no such key; the error names the nearest known one."""
    near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1, cutoff=0.0)
    return Invalid(
        "there is no such setting", setting=name, file=origin, advice=f"Did you mean {near[0]}?" if near else ""
    )


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """TOML reads `spark.sql.x = 1` as nested tables; Spark's keys have dots."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_lake(given: str | None, settings: Settings) -> str:
    """The lake that a command means: the option, the environment, the settings file."""
    path = given or os.environ.get(LAKE_VARIABLE) or settings.lake.path
    if not path:
        raise Invalid("no lake was named", advice=f"Use --lake PATH, {LAKE_VARIABLE}, or [lake] path in {FILE_NAME}.")
    return path
