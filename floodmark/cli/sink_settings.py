"""A sink's settings out of options of the command line, or out of [sinks.NAME] in floodmark.toml.

Texts become what sinks/settings.py checks: this only knows how a setting is written, not whether it is right. A path
means the folder of whoever writes it down, so it is made whole here: runs come from other folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from floodmark.errors import Invalid
from floodmark.model import MAIN
from floodmark.sinks.section import parse_size, read_section, read_values

# Options that are named like their setting.
_SAME = (
    *("url", "path", "format", "where", "token_env", "token_file", "compression", "part_rows", "part_bytes"),
    *("parallel", "namespace", "compact_file_count", "protected"),
)
_OTHER = {"into": "table", "column": "columns"}
# Settings that have keys of their own.
_NESTED = ("catalog", "storage")
__all__ = ["Wanted", "changed_settings", "given_settings", "parse_size", "start_of", "wanted_sink"]


@dataclass(frozen=True)
class Wanted:
    """A sink to be added."""

    kind: str
    tables: list[str]
    settings: dict[str, Any]
    branch: str = MAIN


def wanted_sink(
    name: str, kind: str | None, tables: Iterable[str], given: Mapping[str, Any], sections: Mapping[str, Any]
) -> Wanted:
    """With a kind: what the options say. Without: what the settings file says, and options instead of it."""
    settings = given_settings(given)
    chosen, branch = list(tables), given.get("branch")
    if kind is None:
        section = dict(sections.get(name, {}))
        if not section:
            raise Invalid(
                "nobody says what kind of sink this is",
                sink=name,
                advice=f"Use --kind http, files or iceberg, or write [sinks.{name}] with type into floodmark.toml.",
            )
        declared = read_section(section)
        kind, branch, chosen = declared.kind, branch or declared.branch, chosen or declared.tables
        settings = {**declared.settings, **_merged(settings, section)}
    if not chosen:
        raise Invalid("a sink follows at least one table", sink=name, advice="Name it with --table, or as tables.")
    return Wanted(kind, chosen, {key: value for key, value in settings.items() if value is not None}, branch or MAIN)


def changed_settings(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What `set` was asked to change; of settings that have keys of their own, only the keys that were named."""
    changed = given_settings(given)
    if not changed:
        raise Invalid("nothing to set", advice="Name a setting: --url, --where, …, or --set KEY=VALUE.")
    return _merged(changed, known)


def _merged(changed: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: {**known.get(name, {}), **changed[name]} for name in _NESTED if changed.get(name)}
    return {**changed, **nested}


def given_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the options of a command, as they were given; None puts one back to its default."""
    found = {name: given[name] for name in _SAME if given.get(name) is not None}
    found |= {setting: given[option] for option, setting in _OTHER.items() if given.get(option)}
    if given.get("partition"):
        # An empty one says: not partitioned.
        found["partition"] = [text for text in given["partition"] if text]
    nested = [f"catalog.{text}" for text in given.get("catalog") or ()]
    for text in [*nested, *(given.get("set_") or ())]:
        name, equals, value = text.partition("=")
        if not equals:
            raise Invalid("this is not KEY=VALUE", value=repr(text), advice="Like --set timeout_s=10.")
        outer, _, inner = name.partition(".")
        if outer in _NESTED and inner:
            found[outer] = {**found.get(outer, {}), inner: value}
        else:
            found[name] = value or None
    return read_values(found)


def start_of(text: str) -> str | int:
    """Where a sink begins: a word, or a sequence."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text
