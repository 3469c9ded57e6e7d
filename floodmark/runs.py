"""What every run shares, be it of a job, of maintenance or of a sink: its outcome, its progress, and how it is stopped.

An outcome never confuses new work with none, nor a failure with a success (I12). Callers of the public verbs pass a
callback of plain numbers; inside, every run reports a `Progress`, and the functions below translate once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

# ── outcomes ──

# Of every kind of run: nothing was due, a dry run, an error, an error that needs an operator.
NOTHING_TO_DO, PLANNED, FAILED, REFUSED = "nothing_to_do", "planned", "failed", "refused"
# Of a job: all of it is done; an operator stopped it; the source did not come far enough in time.
DONE, CANCELLED, TIMED_OUT = "done", "cancelled", "timed_out"
# Chunks were loaded again; other chunks of the job may be missing.
REDONE = "redone"
# The process was about to end: the job is interrupted, and any process may resume it.
LEFT_OFF = "left_off"
# Of maintenance: what each verb did, all or in part, or why it did not.
COMPACTED, RETAINED, INDEXED, EXPIRED, SWEPT = "compacted", "retained", "indexed", "expired", "swept"
CONFLICT, PARTIAL, BELOW_THRESHOLD, PROTECTED = "conflict", "partial", "below_threshold", "protected"
# Written with the publish of a retention that removed rows before consumers saw them (catalog/riders.py).
FORCED = "forced"
# Of a sink.
SHIPPED, PAUSED, STOPPED, BUSY = "shipped", "paused", "stopped", "busy"
# The destination asked for a pause until a later time: no run contacts it before.
WAITING = "waiting"


# ── stop ──


class Stopped(Exception):
    """A request stops the run here. Not an error: finished work stays, and the next run continues."""


# ── progress ──


@dataclass(frozen=True)
class Progress:
    """How far a run is: `done` of `total`, in the unit of its work; the total is None if it is unknown.

    `verb` and `table`: what it works on, if a run has several. `size_bytes`: how much it has written.
    """

    done: int
    total: int | None = None
    verb: str = ""
    table: str = ""
    size_bytes: int = 0


Report: TypeAlias = Callable[[Progress], None]

# A caller's callback of a job: units done, units in all.
JobCallback: TypeAlias = Callable[[int, int | None], None]
# Of maintenance: verb, table, done, total (0: unknown).
MaintenanceCallback: TypeAlias = Callable[[str, str, int, int], None]
# Of a sink: table, rows, maximum rows, bytes.
SinkCallback: TypeAlias = Callable[[str, int, int, int], None]
# Of a write: files, bytes.
WriteCallback: TypeAlias = Callable[[int, int], None]


def for_job(callback: JobCallback | None) -> Report | None:
    return None if callback is None else lambda now: callback(now.done, now.total)


def for_maintenance(callback: MaintenanceCallback | None) -> Report | None:
    return None if callback is None else lambda now: callback(now.verb, now.table, now.done, now.total or 0)


def for_sink(callback: SinkCallback | None) -> Report | None:
    return None if callback is None else lambda now: callback(now.table, now.done, now.total or 0, now.size_bytes)
