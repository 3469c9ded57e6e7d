"""The end of a job that is written in the publish of its last step: both become true together, or neither (I2).

Checked under the lake's lock, as every rider: a run that was taken over publishes nothing, and ends nothing. Crash
after the publish: the job is at its end, and nobody has to go on with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, update

from floodmark.catalog import tables
from floodmark.catalog.job_rows import check_job


@dataclass(frozen=True)
class EndRider:
    """A run of a job ends in this state; `error` says what people are told of it."""

    job: str
    run: str
    state: str
    error: Mapping[str, Any] | None = None

    def check(self, tx: Connection) -> None:
        check_job(tx, self.job, self.run)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        job = tables.jobs
        started_ms = tx.execute(select(job.c.started_ms).where(job.c.id == self.job)).scalar()
        # A clock that was set back must not make a run end before it began.
        ended_ms = max(now_ms, started_ms or 0)
        values: dict[str, Any] = {
            "state": self.state,
            "error": None if self.error is None else json.dumps(dict(self.error)),
            "publishes": job.c.publishes + 1,
            "updated_ms": ended_ms,
            "ended_ms": ended_ms,
            **dict.fromkeys(("owner_process", "owner_run", "cancel_ms")),
        }
        tx.execute(update(job).where(job.c.id == self.job).values(values))

    def as_dict(self) -> dict[str, Any]:
        error = None if self.error is None else dict(self.error)
        return {"type": "job_end", "job": self.job, "run": self.run, "state": self.state, "error": error}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EndRider:
        return cls(data["job"], data["run"], data["state"], data["error"])
