"""Whether the lake is fit for work, as load balancers and people ask it: an answer in bounded time, never a silence.

Not ready: its state or its jobs cannot be read, a table, spool or operation is refused until somebody decides, or rows
cannot be written down where this server takes them in. Anything else, also what needs attention, is ready: the text
says what it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodmark import log
from floodmark.errors import FloodmarkError
from floodmark.lake import Lake
from floodmark.report_health import REFUSED
from floodmark.report_jobs import NOT_READY

if TYPE_CHECKING:
    from floodmark.ingest.intake import Intake

# How long a question about the lake's state may take.
ANSWER_S_MAX = 10.0
# As much as one request may bring: less than that is full.
FREE_BYTES_MIN = 64 * 1024 * 1024


def readiness(lake: Lake, intake: Intake | None = None) -> dict[str, Any]:
    """`ready`, and the health text; `reasons` if it is not ready."""
    try:
        health = lake.health()
    except Exception as error:  # noqa: BLE001 - whatever it is: a state that cannot be read is not well
        log.get().warning("the lake's state cannot be read", cause=repr(error))
        return unready(unreadable(error))
    return judge_ready(health.text, health.blocking, intake)


def judge_ready(health: str, blocking: Sequence[str], intake: Intake | None = None) -> dict[str, Any]:
    """The same of a health that somebody has."""
    reasons = [*blocking, *(_intake_problems(intake) if intake is not None else ())]
    if reasons:
        return {"ready": False, "health": health, "reasons": reasons}
    return {"ready": True, "health": health}


def unready(reason: str) -> dict[str, Any]:
    return {"ready": False, "health": f"{NOT_READY}: {reason}", "reasons": [reason]}


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
