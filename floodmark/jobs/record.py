"""The result of a run of a backfill: a named outcome, the job as it is now, and an exit code (I12)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from floodmark.shown import JobFacts

DONE, NOTHING_TO_DO, CANCELLED, FAILED, TIMED_OUT = "done", "nothing_to_do", "cancelled", "failed", "timed_out"
# Chunks were loaded again; other chunks of the job may be missing.
REDONE = "redone"
# The process was about to end: the job is interrupted, and any process may resume it.
LEFT_OFF = "left_off"


@dataclass(frozen=True, repr=False)
class BackfillRun:
    """done: all of it is loaded, some of it by this run. nothing_to_do: it was loaded already. timed_out: the source
    did not come far enough in time. redone: a redo has loaded its chunks again, whatever else is missing.

    `job` has the figures (floodmark/catalog/jobs.py); `error` is why a run failed; `redone` what a redo removed.
    """

    outcome: str
    job: Mapping[str, Any]
    error: Mapping[str, Any] | None = None
    redone: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<BackfillRun {self.outcome}: {JobFacts(self.job)!r}>"

    def _repr_html_(self) -> str:
        return JobFacts({"job": self.job.get("job"), "outcome": self.outcome, **self.job})._repr_html_()

    @property
    def exit_code(self) -> int:
        if self.outcome in (DONE, NOTHING_TO_DO, REDONE, CANCELLED, LEFT_OFF):
            return 0
        return int((self.error or {}).get("exit_code", 1))

    def as_dict(self) -> dict[str, Any]:
        error = None if self.error is None else dict(self.error)
        redone = {} if self.redone is None else {"redone": dict(self.redone)}
        return {"outcome": self.outcome, **self.job, "error": error, **redone}
