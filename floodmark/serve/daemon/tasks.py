"""What the daemon does by itself: ships sinks, maintains tables, resumes jobs, loads drop folders.

Each task calls one of the verbs that a person has, at the edge where its outcome becomes a word: no code here moves
rows. A run checks `stop` between its steps; whatever is cut off is finished, undone or found by the next run, as after
a crash. The verb that needs Spark starts it, and no other does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from floodmark import clock
from floodmark.catalog.jobs import INTERRUPTED, Job
from floodmark.catalog.maintenance_state import Maintenance
from floodmark.errors import Busy, FloodmarkError, NotFound, Unavailable
from floodmark.ingest.drop import FAILED as FAILED_FOLDER
from floodmark.ingest.drop import Drop
from floodmark.json_form import JsonObject
from floodmark.lake import Lake
from floodmark.maintenance.record import MaintenanceRun
from floodmark.runs import CONFLICT, FAILED, PARTIAL, PAUSED, REFUSED, STOPPED
from floodmark.serve.daemon.scheduler import Ran, Task
from floodmark.settings.schedule import Schedule
from floodmark.settings.settings import OFF, JobsSettings, MaintainSettings
from floodmark.shown import count_of
from floodmark.sinks.settings import ICEBERG

SINK_EVERY = "10s"
LOOK_EVERY_S = 10.0
# Maintenance waits, so that a daemon that has just started first loads what waits.
MAINTAIN_FIRST_S = 30.0


def every(text: str) -> Schedule:
    return Schedule(clock.parse_duration_ms(text) / 1000)


@dataclass(frozen=True)
class SinkTask:
    """Ships what is new of one sink, unit by unit, until nothing is."""

    lake: Lake
    sink: str
    pace: Schedule
    kind: str = field(default="sink", init=False)

    @property
    def name(self) -> str:
        return f"sink {self.sink}"

    def run(self, stop: threading.Event) -> Ran:
        try:
            done = self.lake.sinks.run(self.sink, until_empty=True, stop=stop)
        except NotFound:
            return Ran("removed", over=True)
        if done.outcome not in (FAILED, REFUSED):
            # Busy: another process runs it; the next round ships what that one left.
            return Ran(done.outcome, paused=done.outcome == PAUSED)
        return Ran(done.outcome, done.error or Unavailable(f"the run is {done.outcome}", sink=self.sink))


@dataclass(frozen=True)
class MaintainTask:
    """Retains, compacts, indexes, expires and sweeps, in this order, as `floodmark maintain` does.

    It stops between two parts.
    """

    lake: Lake
    settings: MaintainSettings
    pace: Schedule
    name: str = field(default="maintain", init=False)
    kind: str = field(default="maintain", init=False)

    def run(self, stop: threading.Event) -> Ran:
        records: list[Maintenance] = []
        for part in self._parts():
            if stop.is_set():
                return Ran(STOPPED)
            records += part().records
        done = MaintenanceRun(tuple(records))
        if not done.exit_code or done.outcome == CONFLICT:
            return Ran(done.outcome)  # the next run makes up for a conflict
        failed = next(one for one in records if one.outcome in ("failed", "refused", CONFLICT, PARTIAL))
        said = str(failed.detail.get("message") or failed.outcome)
        return Ran(done.outcome, FloodmarkError(said, verb=failed.verb, table=failed.table))

    def _parts(self) -> Iterator[Callable[[], MaintenanceRun]]:
        keeper, chosen = self.lake.maintain, self.settings
        yield keeper.retain
        for head in self.lake.heads():
            yield lambda table=head.table: keeper.compact(table, files_min=chosen.compact_files)  # type: ignore[misc]
        yield keeper.index
        yield lambda: keeper.expire(keep=chosen.keep_versions)
        yield lambda: keeper.sweep(grace=chosen.grace)
        for sink in self.lake.catalog.sinks.all():
            if sink.kind == ICEBERG and sink.state != PAUSED:
                yield lambda name=sink.name: self.lake.sinks.maintain(name)  # type: ignore[misc]


@dataclass(frozen=True)
class JobTask:
    """Goes on with one job, as it was started, if its process died or it failed for a reason that may pass.

    How it failed is the job's own word. If that may pass, this task has failed too, so it is tried again with pauses
    that grow (floodmark/settings/schedule.py), until there was no progress for `give_up`.
    """

    lake: Lake
    job: str
    job_id: str
    give_up: str = JobsSettings.give_up
    kind: str = field(default="jobs", init=False)
    pace: Schedule = field(default=Schedule(None), init=False)

    @property
    def name(self) -> str:
        return f"job {self.job}"

    def run(self, stop: threading.Event) -> Ran:
        if not is_resumed(self.lake.catalog.jobs.find(self.job_id), self.give_up, clock.now_ms()):
            return Ran("nothing_to_do")  # another process resumed it, cancelled it, or acknowledged its failure
        try:
            done = self.lake.backfill.resume(self.job_id, stop=stop, give_up=self.give_up)
        except Busy:
            return Ran("nothing_to_do")
        if not self.lake.catalog.jobs.find(self.job_id).failed_passing:
            return Ran(done.outcome)
        return Ran(done.outcome, Unavailable("the job failed, but a retry may succeed", job=self.job))


def is_resumed(job: Job, give_up: str, now_ms: int) -> bool:
    """Whether the daemon resumes a job by itself. A failure that a person acknowledged is left to that person."""
    if job.status == INTERRUPTED:
        return True
    source = job.settings.get("source")
    source = source if isinstance(source, Mapping) else {}
    # Of a function or an object that cannot be found again, only the same call can resume.
    if source.get("kind") == "object" or ("read" in source and source["read"] is None):
        return False
    since_ms = job.failing_since_ms
    is_new = since_ms is not None and now_ms - since_ms < clock.parse_duration_ms(give_up)
    return job.failed_passing and job.acknowledged_ms is None and is_new


@dataclass(frozen=True)
class WorkFinder:
    """Finds work that came up since: sinks, and jobs that died, or failed for a reason that may pass.

    Each gets a task of its own, which one may take for ever. `paces`: how often the file wants each sink run.
    """

    lake: Lake
    start: Callable[[Task], bool]
    paces: Mapping[str, str | None]
    jobs: JobsSettings = field(default_factory=JobsSettings)
    pace: Schedule = field(default=Schedule(LOOK_EVERY_S))
    name: str = field(default="lookout", init=False)
    kind: str = field(default="jobs", init=False)

    def run(self, stop: threading.Event) -> Ran:
        started = 0
        for sink in self.lake.catalog.sinks.all():
            wanted = self.paces.get(sink.name) or SINK_EVERY
            if wanted != OFF:
                started += self.start(SinkTask(self.lake, sink.name, every(wanted)))
        for job in self.lake.catalog.jobs.all() if self.jobs.resume else ():
            if is_resumed(job, self.jobs.give_up, clock.now_ms()):
                started += self.start(JobTask(self.lake, job.name, job.id, self.jobs.give_up))
        return Ran(f"started {count_of(started, 'task')}" if started else "nothing_to_do")


@dataclass(frozen=True)
class DropTask:
    """Loads the complete files of a drop folder."""

    drop: Drop
    source: str
    pace: Schedule
    settle_s: float
    kind: str = field(default="files", init=False)

    @property
    def name(self) -> str:
        return f"source {self.source}"

    @property
    def about(self) -> JsonObject:
        return JsonObject(self.drop.about)

    def run(self, stop: threading.Event) -> Ran:
        done = self.drop.run(stop.is_set)
        words = []
        if done.loaded:
            words.append(f"loaded {count_of(done.loaded, 'file')}, {count_of(done.rows, 'row')}")
        if done.failed:
            words.append(f"moved {count_of(done.failed, 'bad file')} aside")
        if done.set_aside > done.failed:
            words.append(f"{count_of(done.set_aside, 'bad file')} in {FAILED_FOLDER}")
        # A file that is still being written is checked again as soon as it may be complete.
        again_s = self.settle_s if done.waiting else None
        outcome = "; ".join(words) or "nothing_to_do"
        bad_files = tuple(map(JsonObject, done.bad_files))
        return Ran(outcome, again_s=again_s, set_aside=done.set_aside, bad_files=bad_files)
