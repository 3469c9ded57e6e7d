"""A sink as [sinks.NAME] of the settings file declares it. Pure.

Turns texts into the values that sinks/settings.py checks. This module parses settings; it does not validate them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from floodmark.errors import Invalid
from floodmark.model import MAIN

_SIZE = re.compile(r"([0-9]{1,15}) *(?:([KMG])(i?))?B?", re.IGNORECASE)


@dataclass(frozen=True)
class Declared:
    """A sink to be added. `every` is how often the daemon runs it; None if the section does not set it."""

    kind: str
    tables: list[str]
    settings: dict[str, Any]
    branch: str | None = None
    every: str | None = None

    @property
    def line(self) -> str:
        return self.branch or MAIN


def read_section(section: Mapping[str, Any]) -> Declared:
    """Parse a section."""
    rest = dict(section)
    kind = str(rest.pop("type", ""))
    named, branch, every = rest.pop("tables", []), rest.pop("branch", None), rest.pop("every", None)
    tables = [named] if isinstance(named, str) else list(named)
    return Declared(kind, tables, read_values(rest), branch, every)


def read_values(settings: Mapping[str, Any]) -> dict[str, Any]:
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
        raise Invalid("this is not a size", setting=name, value=repr(text), advice="Write it like 4MiB or 4194304.")
    number, prefix, binary = found.groups()
    power = 0 if prefix is None else "KMG".index(prefix.upper()) + 1
    size_bytes: int = int(number) * (1024 if binary else 1000) ** power
    return size_bytes
