"""Whether the lake is fit for work, as load balancers and people ask it: an answer in bounded time, never a silence.

Not ready: its state or its jobs cannot be read, a table, spool or operation is refused until somebody decides, rows
cannot be written down where this server takes them in, or the lake's store takes no writes. Anything else, also what
needs attention, is ready: the text says what it is.
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

# How long a question about the lake's state may take.
ANSWER_S_MAX = 10.0
# As much as one request may bring: less than that is full.
FREE_BYTES_MIN = 64 * 1024 * 1024
# A store that took a write is not asked again before that; one that did not is asked again at once.
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
        """What is sent: to callers that are not known, `ready` alone; `reasons` where there are some."""
        told = as_json(self)
        names = ("ready", "health", *(["reasons"] if self.reasons else ())) if known else ("ready",)
        return {name: told[name] for name in names}


class StoreWatch:
    """Whether the lake's store takes writes: it is given one small object, and that is deleted."""

    def __init__(self, lake: Lake) -> None:
        self._root = lake.location
        self._storage = impatient(lake.catalog.storage.options, retry_s=0, timeout_s=STORE_WAIT_S)
        self._lock = threading.Lock()
        self._wrote_s: float | None = None

    def problem(self) -> str | None:
        """What keeps files from being written; None if nothing does."""
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
    """Whether it is, and the health text; `reasons` if it is not ready."""
    try:
        health = lake.health()
    except Exception as error:  # noqa: BLE001 - whatever it is: a state that cannot be read is not well
        log.get().warning("the lake's state cannot be read", cause=repr(error))
        return unready(unreadable(error))
    return judge_ready(health.text, health.blocking, intake, store)


def judge_ready(
    health: str, blocking: Sequence[str], intake: Intake | None = None, store: StoreWatch | None = None
) -> Ready:
    """The same of a health that somebody has."""
    reasons = [*blocking, *(_intake_problems(intake) if intake is not None else ())]
    if store is not None and (problem := store.problem()) is not None:
        reasons.append(problem)
    return Ready(not reasons, health, tuple(reasons))


def unready(reason: str) -> Ready:
    return Ready(False, f"{NOT_READY}: {reason}", (reason,))


def unreadable(error: Exception) -> str:
    # Of what nobody thought of, the server's log has the words.
    said = str(error) if isinstance(error, FloodmarkError) else type(error).__name__
    return f"the lake's state cannot be read ({said})"


def _intake_problems(intake: Intake) -> list[str]:
    """What keeps rows from being taken in here, whatever the catalog says: only this process may know it yet."""
    refused = [str(one["table"]) for one in intake.states() if one["state"] == REFUSED]
    found = [f"rows of {', '.join(refused)} are refused here; see `floodmark spool list`"] if refused else []
    place = _nearest(intake.folder)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        found.append(f"rows cannot be taken in: {intake.folder} cannot be written to")
    elif _free_bytes(place) < FREE_BYTES_MIN:
        found.append(f"rows cannot be taken in: the disk of {intake.folder} is full")
    return found


def _free_bytes(place: Path) -> int:
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


def _nearest(folder: Path) -> Path:
    """The folder, or what it will be made in."""
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)
