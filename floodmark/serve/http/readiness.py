"""Whether the lake can work, for load balancers and people: always an answer in bounded time.

Not ready: its state or its jobs cannot be read; a table, spool or operation is refused until an operator decides; this
server cannot write the rows that it takes to its spool; or the lake's store accepts no writes. In any other state, even
one that needs attention, the lake is ready: the text says what it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from floodmark import log
from floodmark.errors import FloodmarkError
from floodmark.json_form import Json, Reported, as_json
from floodmark.lake import Lake
from floodmark.report.jobs import NOT_READY
from floodmark.report.spools import REFUSED
from floodmark.storage.probe import impatient, probe_writing

if TYPE_CHECKING:
    from floodmark.ingest.intake import Intake

# How long a query of the lake's state may take.
ANSWER_S_MAX = 10.0
# As much as one request may bring: a disk with less free space counts as full.
FREE_BYTES_MIN = 64 * 1024 * 1024
# A store that accepted a write is not probed again before that; one that did not is probed again at once.
STORE_AGE_S_MAX = 15.0
# One request, not repeated: well within the time for an answer.
STORE_WAIT_S = 4


@dataclass(frozen=True)
class Ready(Reported):
    """Without a token, where tokens are set: `ready` alone."""

    ready: bool
    health: str | None = None
    reasons: tuple[str, ...] = ()

    def as_dict(self, *, known: bool) -> dict[str, Json]:
        """The body: for unknown callers `ready` alone; `reasons` if there are any."""
        values = as_json(self)
        names = ("ready", "health", *(["reasons"] if self.reasons else ())) if known else ("ready",)
        return {name: values[name] for name in names}


class StoreWatch:
    """Whether the lake's store takes writes: it is given one small object, and that is deleted."""

    def __init__(self, lake: Lake) -> None:
        self._root = lake.location
        self._storage = impatient(lake.catalog.storage.options, retry_s=0, timeout_s=STORE_WAIT_S)
        self._lock = threading.Lock()
        self._wrote_s: float | None = None

    def problem(self) -> str | None:
        """Why files cannot be written; None if they can."""
        with self._lock:
            if self._wrote_s is not None and time.monotonic() - self._wrote_s < STORE_AGE_S_MAX:
                return None
            try:
                probe_writing(self._storage, self._root)
            except FloodmarkError as error:
                self._wrote_s = None
                return f"the lake's store cannot be written ({error})"
            self._wrote_s = time.monotonic()
            return None


def readiness(lake: Lake, intake: Intake | None = None, store: StoreWatch | None = None) -> Ready:
    """Whether the lake is ready, and the health text; `reasons` if it is not ready."""
    try:
        health = lake.health()
    except Exception as error:  # noqa: BLE001 - any error: a state that cannot be read is not well
        log.get().warning("the lake's state cannot be read", cause=repr(error))
        return unready(unreadable(error))
    return judge_ready(health.text, health.blocking, intake, store)


def judge_ready(
    health: str, blocking: Sequence[str], intake: Intake | None = None, store: StoreWatch | None = None
) -> Ready:
    """The same for a health text that the caller already has."""
    reasons = [*blocking, *(_intake_problems(intake) if intake is not None else ())]
    if store is not None and (problem := store.problem()) is not None:
        reasons.append(problem)
    return Ready(not reasons, health, tuple(reasons))


def unready(reason: str) -> Ready:
    return Ready(False, f"{NOT_READY}: {reason}", (reason,))


def unreadable(error: Exception) -> str:
    # For an unforeseen error the server's log has the details.
    said = str(error) if isinstance(error, FloodmarkError) else type(error).__name__
    return f"the lake's state cannot be read ({said})"


def _intake_problems(intake: Intake) -> list[str]:
    """Why this process cannot take rows, whatever the catalog says: perhaps only this process knows it yet."""
    refused = [str(one["table"]) for one in intake.states() if one["state"] == REFUSED]
    found = [f"rows of {', '.join(refused)} are refused; see `floodmark spool list`"] if refused else []
    place = _nearest(intake.folder)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        found.append(f"rows cannot be accepted: {intake.folder} is not writable")
    elif _free_bytes(place) < FREE_BYTES_MIN:
        found.append(f"rows cannot be accepted: the disk of {intake.folder} is full")
    return found


def _free_bytes(place: Path) -> int:
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


def _nearest(folder: Path) -> Path:
    """The folder, or the existing folder above it in which it will be made."""
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)
