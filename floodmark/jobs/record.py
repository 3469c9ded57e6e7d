"""The result of a run of a backfill: a named outcome, the job as it is now, and an exit code (I12)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from floodmark.json_form import Json
from floodmark.runs import CANCELLED, DONE, LEFT_OFF, NOTHING_TO_DO, REDONE
from floodmark.shown import JobFacts


@dataclass(frozen=True, repr=False)
class BackfillRun:
    """done: all of it is loaded, some of it by this run. nothing_to_do: it was loaded already. timed_out: the source
    did not come far enough in time. redone: a redo has loaded its chunks again, whatever else is missing.

    `job` has the figures (floodmark/catalog/jobs.py); `error` is why a run failed; `redone` what a redo removed.
    """

    outcome: str
    job: Mapping[str, Json]
    error: Mapping[str, Json] | None = None
    redone: Mapping[str, Json] | None = None

    def __repr__(self) -> str:
        return f"<BackfillRun {self.outcome}: {JobFacts(self.job)!r}>"

    def _repr_html_(self) -> str:
        return JobFacts({"job": self.job.get("job"), "outcome": self.outcome, **self.job})._repr_html_()

    @property
    def exit_code(self) -> int:
        if self.outcome in (DONE, NOTHING_TO_DO, REDONE, CANCELLED, LEFT_OFF):
            return 0
        code = (self.error or {}).get("exit_code")
        return code if isinstance(code, int) else 1

    def as_dict(self) -> dict[str, Json]:
        error = None if self.error is None else dict(self.error)
        redone = {} if self.redone is None else {"redone": dict(self.redone)}
        return {"outcome": self.outcome, **self.job, "error": error, **redone}
