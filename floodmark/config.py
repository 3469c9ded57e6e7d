"""Settings: `floodmark.toml`, few keys, each with a default. An unknown key is an error that names the nearest."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

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
class Settings:
    lake: LakeSettings = field(default_factory=LakeSettings)
    # master, and any spark.* key as it is.
    spark: dict[str, str] = field(default_factory=dict)
    # endpoint, region and the like for object stores; credentials come from the environment.
    storage: dict[str, str] = field(default_factory=dict)

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


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
            raise _unknown(f"spark.{key}", ["spark.master", "spark.spark.…"], origin)
    try:
        return TypeAdapter(Settings).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            section = LakeSettings if first["loc"][0] == "lake" and len(first["loc"]) > 1 else Settings
            raise _unknown(name, [one.name for one in fields(section)], origin) from error
        raise Invalid("a setting has the wrong form", setting=name, problem=first["msg"], file=origin) from error


def _unknown(name: str, known: list[str], origin: str) -> Invalid:
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
