"""Errors, by what the caller should do about them.

Every error names what failed, the facts as name=value, and what to do next. Any error but CommitUnknown means that
nothing happened and nothing will happen later: the operation was abandoned before the error was raised.

Advice is written with commands, in backticks. A Python program reads the method instead, where one exists; the command
line (and what is stored, or sent over HTTP) has the command. A cause keeps the type and the text of the original
exception, without secrets (I18).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from floodmark.json_form import Json

CAUSE_CHARACTERS_MAX = 500
# Shorter values of variables are no secrets, and would match everywhere.
_SECRET_CHARACTERS_MIN = 6
_HIDDEN = "***"
_SECRET_NAME = r"(?:password|passwd|secret|token|credential|api[-_]?key|access[-_]?key|signature|authorization)"
_SECRETS = (
    (re.compile(r"(\w+://[^\s:/@]*):[^\s/@]+@"), rf"\1:{_HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+", re.IGNORECASE), rf"\1 {_HIDDEN}"),
    (
        re.compile(
            rf"([\w.-]*{_SECRET_NAME}[\w.-]*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&)}}\]]+)", re.IGNORECASE
        ),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(r"\bfmt_[\w-]{20,}|\bA[KS]IA[0-9A-Z]{16}\b"), _HIDDEN),
)
_NAMES_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)

# A name among a command's arguments, quoted or not.
_ARG = r"['\"]?([^\s`'\"-][^\s`'\"]*)['\"]?"
# Commands, and the methods that do the same; the first match counts. The rest of a command is its arguments.
_METHODS = tuple(
    (re.compile(rf"`floodmark {command}`"), method)
    for command, method in (
        (r"init", "floodmark.open(path, create=True)"),
        (r"restore\b[^`]*", "floodmark.restore(path, into)"),
        (r"backup\b[^`]*", "lake.backup(path)"),
        (r"(tables|status|history|audit)(?: --json)?", r"lake.\1()"),
        (rf"show {_ARG}[^`]*", r'lake.show("\1")'),
        (r"load --create", "lake.create_table(name, schema)"),
        (r"load\b[^`]*", "lake.append(table, rows)"),
        (r"delete\b[^`]*", "lake.delete(table, where)"),
        (r"update\b[^`]*", "lake.update(table, set, where)"),
        (r"query\b[^`]*", "lake.sql(query)"),
        (r"changes\b[^`]*", "lake.changes(table, since)"),
        (r"(plan|apply)\b[^`]*", r"lake.\1(file)"),
        (r"adopt\b[^`]*", "lake.adopt(name, location)"),
        (rf"undrop {_ARG}[^`]*", r'lake.undrop("\1")'),
        (rf"drop {_ARG}[^`]*", r'lake.drop_table("\1")'),
        (r"rename\b[^`]*", "lake.rename_table(table, new_name)"),
        (r"column (add|rename|drop)\b[^`]*", r"lake.\1_column(table, column, …)"),
        (rf"history --table {_ARG}", r'lake.history(table="\1")'),
        (r"recover --discard (\S+)(?: --apply)?", r'lake.recover(discard=["\1"])'),
        (r"recover\b[^`]*", "lake.recover()"),
        (rf"repair {_ARG} --accept --apply", r'lake.repair("\1", choice="accept", apply=True)'),
        (rf"repair {_ARG} --revert --apply", r'lake.repair("\1", choice="revert", apply=True)'),
        (rf"repair {_ARG} --apply", r'lake.repair("\1", apply=True)'),
        (rf"repair {_ARG}", r'lake.repair("\1")'),
        (r"repair --give-up[^`]*", "lake.give_up_unreadable()"),
        (r"repair", "lake.repair()"),
        (r"maintain policy (\S+) --retention (\S+)", r'lake.maintain.set_policy("\1", "\2")'),
        (r"maintain --grace", "lake.maintain.sweep(grace=…)"),
        (r"maintain (compact|retain|expire|sweep)", r"lake.maintain.\1()"),
        (rf"maintain --sink {_ARG}[^`]*", r'lake.sinks.maintain("\1")'),
        (r"maintain", "lake.maintain.run()"),
        (r"sink (?:list|status)(?: --json)?", "lake.sinks.status()"),
        (rf"sink status {_ARG}", r'lake.sinks.about("\1")'),
        (rf"sink replay {_ARG} --table {_ARG} --from {_ARG}", r'lake.sinks.replay("\1", table="\2", start="\3")'),
        (rf"sink replay {_ARG} --from {_ARG}", r'lake.sinks.replay("\1", start="\2")'),
        (rf"sink (pause|resume|remove|run|check) {_ARG}", r'lake.sinks.\1("\2")'),
        (rf"sink quarantine add {_ARG}[^`]*", r'lake.sinks.set_aside("\1", …)'),
        (rf"sink remove {_ARG} --apply", r'lake.sinks.remove("\1")'),
        (rf"sink quarantine (retry|drop) {_ARG}", r'lake.sinks.\1("\2")'),
        (rf"sink quarantine list {_ARG}", r'lake.sinks.quarantine("\1")'),
        (rf"sink (add|set|replay|run) {_ARG}[^`]*", r'lake.sinks.\1("\2", …)'),
        (r"sink (add|set|replay|run|pause|resume|remove|quarantine)\b[^`]*", r"lake.sinks.\1(name, …)"),
        (rf"backfill redo {_ARG}[^`]*", r'lake.backfill.redo("\1", …)'),
        (rf"backfill unbind {_ARG} {_ARG}", r'lake.backfill.unbind("\1", "\2")'),
        (r"backfill list[^`]*", "lake.backfill.list()"),
        (rf"backfill (show|resume|cancel|ack) {_ARG}", r'lake.backfill.\1("\2")'),
        (r"backfill (show|resume|cancel|ack|column|history)\b[^`]*", r"lake.backfill.\1(…)"),
        (r"branch list", "lake.branches.list()"),
    )
)
_reads_commands = False


@contextmanager
def read_on_the_command_line() -> Iterator[None]:
    """Inside, errors name commands: a person reads them at a prompt, and has no lake object."""
    global _reads_commands
    before, _reads_commands = _reads_commands, True
    try:
        yield
    finally:
        _reads_commands = before


def with_methods(advice: str) -> str:
    """Advice for a Python program. Commands without a method stay as they are."""
    for command, method in _METHODS:
        advice = command.sub(rf"`{method}`", advice)
    return advice


def cause_text(error: BaseException) -> str:
    """An exception as text: its type and its message in one line, without secrets."""
    name = error.kind if isinstance(error, FloodmarkError) else type(error).__name__
    text = " ".join(str(error).split())
    said = without_secrets(f"{name}: {text}" if text else name)
    return said if len(said) <= CAUSE_CHARACTERS_MAX else f"{said[: CAUSE_CHARACTERS_MAX - 1]}…"


def without_secrets(text: str) -> str:
    """Hides text that looks like a secret, and the values of this process's variables that are named like one."""
    for name, value in os.environ.items():
        if len(value) >= _SECRET_CHARACTERS_MIN and _NAMES_SECRET.search(name):
            text = text.replace(value, _HIDDEN)
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


_ENDS = (".", "?", "!", ":", ";")


class FloodmarkError(Exception):
    """Base of every error that Floodmark raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, advice: str = "", **facts: Any) -> None:
        self.message = message
        self.advice = advice
        self.facts = {
            name: cause_text(value) if isinstance(value, BaseException) else value
            for name, value in facts.items()
            if value is not None
        }
        super().__init__(message)

    @property
    def kind(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self.facts.items())
        said = f"{self.message} [{facts}]" if facts else self.message
        advice = self._said_advice()
        # Two sentences: run together, the advice reads as a part of the message.
        return f"{said}{'' if said.endswith(_ENDS) else '.'} {advice}" if advice else said

    def _said_advice(self) -> str:
        return self.advice if _reads_commands else with_methods(self.advice)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "message": self.message,
            "facts": {name: str(value) for name, value in self.facts.items()},
            "advice": self.advice,
        }


class Invalid(FloodmarkError):
    """The input is wrong: fix it. Nothing was changed."""

    exit_code = 2


class NotFound(FloodmarkError):
    """No such lake, table, version or operation."""

    exit_code = 2


class BelowRetention(FloodmarkError):
    """It was there and is gone: its window has ended."""

    exit_code = 2


class Incomplete(FloodmarkError):
    """The answer is not known yet; ask again."""

    exit_code = 4


class Conflict(FloodmarkError):
    """Somebody else changed what this stood on: try again on the new state."""

    exit_code = 3


class ConflictRecord(Protocol):
    """One conflict of a merge."""

    def as_dict(self) -> dict[str, Json]: ...


class FoundConflicts(Protocol):
    """What a merge found."""

    @property
    def conflicts(self) -> Sequence[ConflictRecord]: ...

    @property
    def conflicts_total(self) -> int: ...


class MergeConflict(Conflict):
    """Two branches changed the same things, each in its own way. Nothing was changed.

    `merged` is what the merge found out; `conflicts` are the first of its conflicts as records, `conflicts_total` says
    how many there are.
    """

    def __init__(self, message: str, *, merged: FoundConflicts, advice: str = "", **facts: Any) -> None:
        self.merged = merged
        self.conflicts = merged.conflicts
        self.conflicts_total = merged.conflicts_total
        super().__init__(message, advice=advice, conflicts=merged.conflicts_total, **facts)

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "conflicts": [conflict.as_dict() for conflict in self.conflicts]}


class Busy(FloodmarkError):
    """Another holder is at work: try later."""

    exit_code = 4


class Unavailable(FloodmarkError):
    """A part that is needed did not answer: retry."""

    exit_code = 4


class CommitUnknown(FloodmarkError):
    """The commit may or may not have happened: ask the catalog with lake.resolve(error.operation)."""

    exit_code = 4
    _ASK = "Run `floodmark recover`, then look for it in `floodmark history`; do not send the rows again before that."

    def _said_advice(self) -> str:
        if self.advice == self._ASK and not _reads_commands:
            return "Ask the catalog with lake.resolve(operation); do not send the rows again before that."
        return super()._said_advice()

    def __init__(self, message: str, *, operation: str, advice: str = "", **facts: Any) -> None:
        self.operation = operation
        super().__init__(
            message,
            advice=advice or self._ASK,
            operation=operation,
            **facts,
        )


class Fenced(FloodmarkError):
    """Another process took this operation over and undid it: stop."""

    exit_code = 5


class Corrupt(FloodmarkError):
    """Something stored cannot be understood: stop and look. It is kept as it is."""

    exit_code = 5


class TooNew(FloodmarkError):
    """The lake was made by a newer Floodmark: upgrade."""

    exit_code = 5


class TooOld(FloodmarkError):
    """The lake was made by a Floodmark from before the first release: take its rows out with that one."""

    exit_code = 5
