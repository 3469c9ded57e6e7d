"""Structured logs to stderr: one line per event, with the operation's id if it has one.

Quiet by default (warnings); FLOODMARK_LOG=debug|info|warning|error sets the level, FLOODMARK_LOG_FORMAT=json the form.
Never give it a secret (I18).
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def get(operation: str | None = None, **context: str) -> FilteringBoundLogger:
    """A logger whose lines carry the operation's id."""
    import structlog

    if not structlog.is_configured():
        _configure(structlog)
    logger: FilteringBoundLogger = structlog.get_logger("floodmark")
    bound: FilteringBoundLogger = logger.bind(**({"operation": operation} if operation else {}), **context)
    return bound


class _Forgiving(io.TextIOBase):
    """A stream that drops what it cannot write: reporting a failure must not fail, nor end the process."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None: the process was started without one

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            if self._stream is not None:
                return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()


def _configure(structlog: ModuleType) -> None:
    level = {"debug": 10, "info": 20, "warning": 30, "error": 40}.get(
        os.environ.get("FLOODMARK_LOG", "warning").lower(), 30
    )
    as_json = os.environ.get("FLOODMARK_LOG_FORMAT") == "json"
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer() if as_json else structlog.processors.LogfmtRenderer(bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=_Forgiving(sys.stderr)),
        cache_logger_on_first_use=False,
    )
