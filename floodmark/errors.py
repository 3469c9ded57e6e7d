"""Errors, by what the caller should do about them.

Every error says what failed, the facts as name=value, and what to do next. Any error but CommitUnknown means that
nothing happened and nothing will happen later: the operation was abandoned before the error was raised.
"""

from __future__ import annotations

from typing import Any, ClassVar


class FloodmarkError(Exception):
    """Base of every error that Floodmark raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, advice: str = "", **facts: Any) -> None:
        self.message = message
        self.advice = advice
        self.facts = {name: value for name, value in facts.items() if value is not None}
        super().__init__(message)

    @property
    def kind(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return " ".join(part for part in (self.message, f"[{facts}]" if facts else "", self.advice) if part)

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
    """The answer cannot be told yet; ask again."""

    exit_code = 4


class Conflict(FloodmarkError):
    """Somebody else changed what this stood on: try again on the new state."""

    exit_code = 3


class Busy(FloodmarkError):
    """Another holder is at work: try later."""

    exit_code = 4


class Unavailable(FloodmarkError):
    """A part that is needed did not answer: retry."""

    exit_code = 4


class CommitUnknown(FloodmarkError):
    """The commit may or may not have happened: ask the catalog with lake.resolve(error.operation)."""

    exit_code = 4

    def __init__(self, message: str, *, operation: str, advice: str = "", **facts: Any) -> None:
        self.operation = operation
        super().__init__(
            message,
            advice=advice or "Ask the catalog with lake.resolve(operation); do not send the rows again before that.",
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
