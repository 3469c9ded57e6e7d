"""Whether the lake is fit for work, as load balancers and people ask it: an answer in bounded time, never a silence.

Not ready: its state or its jobs cannot be read, or an operation cannot be understood, so that writes are refused.
Anything else, also what needs attention, is ready: the text says what it is.
"""

from __future__ import annotations

from typing import Any

from floodmark import log
from floodmark.errors import FloodmarkError
from floodmark.lake import Lake
from floodmark.report_jobs import NOT_READY

# How long a question about the lake's state may take.
ANSWER_S_MAX = 10.0


def readiness(lake: Lake) -> dict[str, Any]:
    """`ready`, and the health text; `reasons` if it is not ready."""
    try:
        health = str(lake.status()["health"])
    except Exception as error:  # noqa: BLE001 - whatever it is: a state that cannot be read is not well
        log.get().warning("the lake's state cannot be read", cause=repr(error))
        # Of what nobody thought of, the server's log has the words.
        said = str(error) if isinstance(error, FloodmarkError) else type(error).__name__
        return unready(f"the lake's state cannot be read ({said})")
    if health.startswith((NOT_READY, "refused")):
        return {"ready": False, "health": health, "reasons": [health]}
    return {"ready": True, "health": health}


def unready(reason: str) -> dict[str, Any]:
    return {"ready": False, "health": f"{NOT_READY}: {reason}", "reasons": [reason]}
