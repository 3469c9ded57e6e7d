"""What a settings file declares: checked as a whole before anything starts, then created in the lake where it is new.

Every error names its place in the file. The packages that own tables, sinks and sources check them, and their refusals
get the place of the setting that they name. Against the lake: a table that a source or a sink names must exist or be
declared. New sinks are created, new tables only on request. Where the lake differs from the file, the difference is
reported and the lake stays as it is: `floodmark apply` and `floodmark sink set` change it, a start of the daemon does
not. The report has what exists, what is declared, and a command that works as printed: hints that lead to each other
are no help.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from floodmark.catalog.sink_state import Sink
from floodmark.errors import FloodmarkError, Invalid
from floodmark.json_form import Json
from floodmark.lake import Lake
from floodmark.model import MAIN
from floodmark.schema.file import WantedTable, wanted_tables
from floodmark.schema.step import REFUSED
from floodmark.settings.places import TomlText
from floodmark.settings.settings import FILE_NAME, Settings, SourceSettings, wrong_setting
from floodmark.sinks.settings import (
    KINDS,
    AnySettings,
    FilesSettings,
    SinkSection,
    check_name,
    parse_settings,
    read_section,
    settings_from_json,
    settled_paths,
)
from floodmark.sinks.sinks import PLACE
from floodmark.storage import local_path, root_location
from floodmark.storage.options import checked

T = TypeVar("T")


@dataclass(frozen=True)
class DeclaredSink:
    """A sink of the file, and its settings as they are checked."""

    declared: SinkSection
    settings: AnySettings


@dataclass(frozen=True)
class Declaration:
    """All that the file declares, checked as far as that goes without a lake."""

    text: TomlText
    tables: tuple[WantedTable, ...]
    sinks: Mapping[str, DeclaredSink]
    sources: Mapping[str, SourceSettings]


def check_file(settings: Settings) -> Declaration:
    """The declaration of a file; `Invalid` with file, line and column for the first error in it."""
    text = settings.text
    with _placed(text, "storage"):
        checked(settings.storage)
    with _placed(text, "tables"):
        tables = wanted_tables(settings.tables, text.file or "the settings")
    sinks = {name: _sink(name, section, text) for name, section in settings.sinks.items()}
    _check_folders(settings.sources, sinks, text)
    if settings.serve.spool is not None and "://" in settings.serve.spool:
        raise wrong_setting("serve.spool", "a folder on a disk of this machine", text)
    return Declaration(text, tables, sinks, settings.sources)


def check_lake(declaration: Declaration, tables: set[str], sinks: Collection[Sink] = ()) -> None:
    """Check that every table that a source or a sink names exists or is declared."""
    declared = {table.name for table in declaration.tables if not table.drop}
    known = sorted(tables | declared)
    for name, source in declaration.sources.items():
        if source.table not in known:
            raise _no_table(f"sources.{name}.table", source.table, known, declaration.text)
    for name, sink in declaration.sinks.items():
        if sink.declared.line == MAIN:  # tables of other branches are unknown before the branches exist
            # A sink goes on with a table that was renamed; that the file has its old name is a difference, no error.
            followed = [one for there in sinks if there.name == name for one in there.tables]
            for table in sink.declared.tables:
                if table not in known and not any(one.is_called(table) for one in followed):
                    raise _no_table(f"sinks.{name}.tables", table, known, declaration.text)


def check_apart(declaration: Declaration, lake: str, spool: Path | None) -> None:
    """No drop folder is inside the lake's folder or spool, nor the other way round: files would be mistaken for others.

    `check_file` compares the folders of sources and sinks with each other.
    """
    own = [Path(found).resolve() for found in (local_path(root_location(lake)), spool) if found is not None]
    for name, source in declaration.sources.items():
        folder = source_path(source)
        for other in own:
            if _overlap(folder, other):
                problem = f"a drop folder must be outside of {other}, which belongs to the lake"
                raise wrong_setting(f"sources.{name}.path", problem, declaration.text)


def source_path(source: SourceSettings) -> Path:
    """The absolute path of a source's folder, relative to where the daemon was started."""
    return Path(os.path.expanduser(source.path)).resolve()


def make_new(declaration: Declaration, settings: Settings, lake: Lake, *, create: bool) -> list[str]:
    """Create what is new: sinks, and with `create` tables too. Returns where the lake differs from the file.

    Crash in between: what was created stays, and is not new at the next start.
    """
    there = {head.table.lower() for head in lake.heads()}
    new = {name: entry for name, entry in settings.tables.items() if name.lower() not in there}
    wanted = {table.name for table in declaration.tables if not table.drop}
    if create and (made := {name: entry for name, entry in new.items() if name in wanted}):
        with _placed(declaration.text, "tables"):
            lake.apply(made, message=f"tables of {declaration.text.file}")
    sinks = lake.catalog.sinks.all()
    check_lake(declaration, {head.table for head in lake.heads()}, sinks)
    differences = _table_differences(declaration, settings, lake)
    known = {sink.name: sink for sink in sinks}
    for name, sink in declaration.sinks.items():
        declared = sink.declared
        if name not in known:
            with _placed(declaration.text, f"sinks.{name}"):
                _check_tables_exist(name, declared, lake)
                lake.sinks.add(
                    name,
                    declared.kind,
                    tables=declared.tables,
                    start=None,
                    branch=declared.line,
                    **_values(declared.settings),
                )
        elif found := _sink_differences(known[name], sink):
            differences.append(_sink_text(known[name], declared, found, declaration.text.file))
    return differences


def _check_tables_exist(name: str, declared: SinkSection, lake: Lake) -> None:
    """Check that the sink's tables exist; one that is declared but not created is an error of the sink."""
    there = {head.table for head in lake.heads(declared.line)}
    for table in declared.tables:
        if table not in there:
            raise Invalid(
                "the table is declared, but does not exist yet",
                table=table,
                sink=name,
                setting=f"sinks.{name}.tables",
                advice="Create it with `floodmark apply`, or start with `floodmark run --create`.",
            )


def _table_differences(declaration: Declaration, settings: Settings, lake: Lake) -> list[str]:
    if not settings.tables:
        return []
    with _placed(declaration.text, "tables"):
        plan = lake.plan(settings.tables, check=False)
    file = declaration.text.file
    apply = _command("apply --allow-destructive" if plan.destructive else "apply", file)
    said = []
    for step in plan.steps:
        if step.kind == REFUSED:
            way = f"this change is refused: {step.reason}. {step.way}"
        elif plan.refused:
            way = "`floodmark apply` applies it once the rest of the file can be applied"
        else:
            way = f"`{_command('plan', file)}` shows it, `{apply}` applies it"
        said.append(f"table {step.table} differs from its declaration: {step.text}; {way}")
    return said


@dataclass(frozen=True)
class _Difference:
    setting: str
    there: Json
    declared: Json

    def __str__(self) -> str:
        return f"{self.setting} is {_shown(self.there)} in the lake, and {_shown(self.declared)} in the file"


def _sink_differences(known: Sink, sink: DeclaredSink) -> list[_Difference]:
    """How the lake's sink differs from the declared one; of settings with keys of their own, which keys."""
    declared = sink.declared
    tables = sorted({followed.table for followed in known.tables} | set(known.lost))
    pairs: dict[str, tuple[Json, Json]] = {
        "type": (known.kind, declared.kind),
        "tables": (tables, sorted(set(declared.tables))),
        "branch": (known.branch, declared.line),
    }
    if known.kind == declared.kind:
        stored = _by_key(settings_from_json(known.kind, known.settings))
        said = _by_key(sink.settings)
        pairs |= {key: (stored.get(key), said.get(key)) for key in sorted({*stored, *said})}
    return [_Difference(key, *pair) for key, pair in pairs.items() if pair[0] != pair[1]]


def _by_key(settings: AnySettings) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for key, value in json.loads(settings.to_json()).items():
        found |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
    return found


def _sink_text(known: Sink, declared: SinkSection, found: list[_Difference], file: str) -> str:
    name, renamed = known.name, {one.shipped_as: one.table for one in known.tables if one.shipped_as != one.table}
    fixed = ("type", "tables", "branch", *PLACE[declared.kind])
    # `sink set` cannot remove a key that only the lake's sink has.
    stuck = [one for one in found if one.setting in fixed or ("." in one.setting and one.declared is None)]
    now = [renamed.get(table, table) for table in declared.tables]
    if renamed and [one.setting for one in found] == ["tables"] and sorted(set(now)) == found[0].there:
        gone = "; ".join(f"{table} was renamed to {renamed[table]}" for table in declared.tables if table in renamed)
        way = f"{gone}, and the sink follows it. Write tables = {json.dumps(now)} in the file"
    elif stuck:
        remove = _command(f"sink remove {name} --apply", file)
        way = (
            f"{stuck[0].setting} of a sink cannot change. Use the same value in the file, or declare it under another "
            f"name; or `{remove}`: the next start then adds it as declared, and it sends all rows again"
        )
    else:
        options = " ".join(_option(one) for one in found)
        way = f"`{_command(f'sink set {name} {options}', file)}` sets what is declared"
    return f"sink {name} differs from its declaration: {'; '.join(map(str, found))}. {way[0].upper()}{way[1:]}"


def _option(one: _Difference) -> str:
    """A setting as `floodmark sink set` takes it; without a value it returns to its default."""
    if isinstance(one.declared, list):
        option = {"columns": "--column", "partition": "--partition"}[one.setting]
        return " ".join(f"{option} {shlex.quote(value)}" for value in one.declared or [""])
    value = "" if one.declared is None else one.declared
    return f"--set {shlex.quote(f'{one.setting}={value}')}"


def _shown(value: Json) -> str:
    if value is None:
        return "not set"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _command(verb: str, file: str) -> str:
    """A command that names the lake of this file, so that it works in a shell whose environment names another lake."""
    return f"floodmark {verb}" if file in ("", FILE_NAME) else f"floodmark --config {shlex.quote(file)} {verb}"


# ── one section ──


def _sink(name: str, section: Mapping[str, Json], text: TomlText) -> DeclaredSink:
    named = section.get("tables", [])
    if not isinstance(named, str) and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        raise wrong_setting(f"sinks.{name}.tables", 'the name of a table, or a list like ["events"]', text)
    if not named:
        raise wrong_setting(f"sinks.{name}.tables", "a sink follows at least one table", text)
    if section.get("type") not in KINDS:
        raise wrong_setting(f"sinks.{name}.type", f"one of {', '.join(KINDS)}", text)
    with _placed(text, f"sinks.{name}"):
        check_name(name)
        declared = read_section(section)
        return DeclaredSink(declared, parse_settings(declared.kind, settled_paths(_values(declared.settings))))


def _values(settings: Mapping[str, T]) -> dict[str, T]:
    return {key: value for key, value in settings.items() if value is not None}


def _check_folders(sources: Mapping[str, SourceSettings], sinks: Mapping[str, DeclaredSink], text: TomlText) -> None:
    """No two sources share a drop folder, and no sink writes into one: its output would be loaded again."""
    folders: dict[Path, str] = {}
    for name, sink in sinks.items():
        with _placed(text, f"sinks.{name}"):
            if (written := _sink_path(sink)) is not None:
                folders[written] = f"sink {name}"
    for name, source in sources.items():
        setting, folder = f"sources.{name}.path", source_path(source)
        if "://" in source.path:
            raise wrong_setting(setting, "a folder of this machine", text)
        for other, owner in folders.items():
            if _overlap(folder, other):
                raise wrong_setting(setting, f"{owner} uses this folder too, or a parent or subfolder of it", text)
        folders[folder] = f"source {name}"


def _sink_path(sink: DeclaredSink) -> Path | None:
    """The folder that a sink writes files to; None if it is not on this machine."""
    if not isinstance(sink.settings, FilesSettings):
        return None
    found = local_path(root_location(sink.settings.path))
    return None if found is None else Path(found).resolve()


def _overlap(one: Path, other: Path) -> bool:
    return one == other or one in other.parents or other in one.parents


def check_folders_exist(declaration: Declaration, *, create: bool) -> None:
    """Check the drop folders; with `create` they are made."""
    for name, source in declaration.sources.items():
        folder = source_path(source)
        if create:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise wrong_setting(f"sources.{name}.path", str(error), declaration.text) from error
        if not folder.is_dir():
            problem = f"there is no such folder: {folder}; create it, or start with --create"
            raise wrong_setting(f"sources.{name}.path", problem, declaration.text)


# ── places ──


@contextmanager
def _placed(text: TomlText, section: str) -> Iterator[None]:
    """Lower packages refuse without the place in the file; add it."""
    try:
        yield
    except FloodmarkError as error:
        if error.exit_code != Invalid.exit_code:
            raise
        named = str(error.facts.get("setting") or error.facts.get("option") or "")
        # For an unknown key the place is its name, for others their value.
        is_value = bool(named) and not error.message.startswith(("there is no such setting", "unknown"))
        setting = named if named.startswith(f"{section}.") else f"{section}.{named}" if named else section
        if not named and section == "tables" and "table" in error.facts:
            setting, is_value = _table_setting(error.facts, text), True
        facts = {**error.facts, "setting": setting, "file": text.where(setting, value=is_value) or None}
        raise Invalid(error.message, advice=error.advice, **facts) from error


def _table_setting(facts: Mapping[str, Json], text: TomlText) -> str:
    """The part of a table's entry that an error is about, which names its table and perhaps a column."""
    table = f"tables.{facts['table']}"
    for inner in (f"columns.{facts.get('column')}", "columns", "schema"):
        if text.find(f"{table}.{inner}") != text.find(table):
            return f"{table}.{inner}"
    return table


def _no_table(setting: str, table: str, known: list[str], text: TomlText) -> Invalid:
    near = difflib.get_close_matches(table, known, n=1)
    there = f"The tables are: {', '.join(known)}." if known else "There are no tables yet."
    return Invalid(
        "the lake has no such table, and the file declares none",
        table=table,
        setting=setting,
        file=text.where(setting, value=True) or None,
        advice=f"{f'Did you mean {near[0]}?' if near else there} Declare it as [tables.{table}], or create it first.",
    )
