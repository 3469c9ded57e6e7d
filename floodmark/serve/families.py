"""The overview as Prometheus sees it: a record in, metric families out. Pure.

Every figure is one that `floodmark status --json` or a list of the API has under a like name: none is computed here
but sums. What is not known is left out, never zero. Labels are bounded: of tables, sinks and jobs the first so many
have series of their own, the rest is one series named `(others)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from floodmark import clock
from floodmark.catalog.job import FAILED, INTERRUPTED, PENDING, RUNNING, UNKNOWN
from floodmark.report_health import FINE, REFUSED

LABELS_MAX = 200
OTHERS = "(others)"
# The states of jobs that matter now: those that are over are none of them.
JOB_STATES = (PENDING, RUNNING, FAILED, INTERRUPTED, UNKNOWN)

Row = Mapping[str, Any]
Figure = Callable[[Row], float | None]


def lake_families(found: Row, ready: bool) -> Iterator[Metric]:
    """All families of an overview."""
    status = found["status"]
    yield gauge("floodmark_ready", "Whether the lake is fit for work, as /readyz says.", ready)
    yield gauge("floodmark_healthy", "Whether its health is fine; what else it is needs somebody.", _is_fine(status))
    yield gauge("floodmark_lake_version", "The newest version of the lake.", status["version"])
    yield counter("floodmark_commits", "Publishes of the lake, of all branches.", status["version"])
    yield gauge("floodmark_lake_versions", "Versions that can be read.", status["versions"])
    yield gauge("floodmark_lake_tables", "Tables of main.", status["tables"])
    yield gauge("floodmark_maintenance_due", "Things that maintenance has to do.", len(status["due"]))
    yield gauge("floodmark_quarantined_rows", "Rows put aside by sinks and spools.", status["quarantined"])
    operations = {state: len(status[state]) for state in ("running", "pending", "unknown")}
    yield by_label("floodmark_operations", "Operations that are not over, by state.", "state", operations)
    yield by_label("floodmark_healed", "What healing and repairs did.", "outcome", status["healed"], counted=True)
    yield from _tables(found["tables"])
    yield from _sinks(status["sinks"], found["sinks"])
    yield from _spools(status["spools"])
    yield from _jobs(status["jobs"])
    yield from _daemon(status["daemon"])


def _is_fine(status: Row) -> bool:
    return bool(status["health"] == FINE)


def _maintenance_failed(sink: Row) -> int:
    return sum(one["outcome"] == "failed" for one in sink["maintenance"])


def _tables(tables: Sequence[Row]) -> Iterator[Metric]:
    family = _Families("table", tables, largest="rows")
    yield family.gauge("floodmark_table_rows", "Rows of a table.", _of("rows"))
    yield family.gauge("floodmark_table_files", "Data files of a table.", _of("files"))
    yield family.gauge("floodmark_table_bytes", "Bytes of a table's data files.", _of("bytes"))
    yield family.gauge("floodmark_table_small_files", "Data files worth a compaction.", _of("small_files"))


def _sinks(short: Sequence[Row], whole: Sequence[Row]) -> Iterator[Metric]:
    family = _Families("sink", short, largest="lag_rows")
    yield family.gauge("floodmark_sink_lag_rows", "Changes that a sink has not shipped yet.", _of("lag_rows"))
    yield family.gauge(
        "floodmark_sink_lag_seconds", "The age of the oldest of them.", lambda one: one["lag_ms"] / 1000, fold=max
    )
    yield family.gauge("floodmark_sink_quarantined_rows", "Rows that a destination refused.", _of("quarantined"))
    failed = "Whether a sink's last run failed or was refused."
    yield family.gauge("floodmark_sink_failed", failed, lambda one: one["error"] is not None)
    maintenance = "How many kinds of maintenance failed last on the tables that a sink ships to."
    yield family.gauge("floodmark_sink_maintenance_failed", maintenance, _maintenance_failed)
    paused = "Whether a sink is paused."
    yield family.gauge("floodmark_sink_paused", paused, lambda one: one["state"] == "paused")
    sent = _Families("sink", whole)
    yield sent.counter("floodmark_sink_units", "Units that a sink has settled.", _total("units"))
    yield sent.counter("floodmark_sink_rows", "Rows that a sink has shipped.", _total("rows"))
    yield sent.counter("floodmark_sink_bytes", "Bytes that a sink has shipped.", _total("bytes"))


def _spools(spools: Sequence[Row]) -> Iterator[Metric]:
    family = _Families("table", spools, largest="waiting_bytes")
    yield family.gauge("floodmark_spool_waiting_records", "Requests not yet in their table.", _of("waiting_records"))
    yield family.gauge("floodmark_spool_waiting_rows", "Rows not yet in their table.", _of("waiting_rows"))
    yield family.gauge("floodmark_spool_waiting_bytes", "Bytes of them on disk.", _of("waiting_bytes"))
    oldest = "The age of the oldest of them."
    yield family.gauge("floodmark_spool_oldest_seconds", oldest, _seconds("oldest_ms"), fold=max)
    yield family.gauge("floodmark_spool_quarantined_rows", "Rows taken that did not fit.", _of("quarantined"))
    refused = "Whether a spool is refused."
    yield family.gauge("floodmark_spool_refused", refused, lambda one: one["state"] == REFUSED)
    yield family.counter("floodmark_spool_fed_records", "Requests brought into their table.", _of("fed_records"))
    yield family.counter("floodmark_spool_fed_rows", "Rows brought into their table.", _of("fed_rows"))


def _jobs(jobs: Sequence[Row] | None) -> Iterator[Metric]:
    """None: they cannot be read, and the lake is not ready."""
    if jobs is None:
        return
    states = {state: sum(job["status"] == state for job in jobs) for state in JOB_STATES}
    yield by_label("floodmark_jobs", "Jobs that matter now, by state.", "state", states)
    family = _Families("job", jobs)
    yield family.gauge("floodmark_job_processed", "Chunks or rows that a job has done.", _of("processed"))
    yield family.gauge("floodmark_job_wanted", "Chunks or rows that it has to do in all.", _of("total"))


def _daemon(daemon: Row | None) -> Iterator[Metric]:
    alive = daemon is not None and daemon["alive"]
    yield gauge("floodmark_daemon_alive", "Whether a daemon runs the lake's tasks.", alive)
    family = _Families("task", [{"task": one["name"], **one} for one in (daemon or {}).get("tasks", ())])
    yield family.gauge("floodmark_task_failures", "Failures of a task in a row.", _of("failures"))
    yield family.gauge("floodmark_task_files_set_aside", "Bad files of a drop folder that lie aside.", _of("set_aside"))
    ended = "When the last run of a task ended, if it did not fail."
    yield family.gauge("floodmark_task_last_success_timestamp_seconds", ended, _last_success, fold=max)


def _last_success(task: Row) -> float | None:
    if task.get("failures") or task.get("last_error") or not task.get("last_ended"):
        return None
    return clock.parse_time_ms(task["last_ended"]) / 1000


# ── families ──


def gauge(name: str, help: str, value: float | None) -> Metric:
    return GaugeMetricFamily(name, help, value=None if value is None else float(value))


def counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=float(value))


def by_label(name: str, help: str, label: str, values: Mapping[str, float], *, counted: bool = False) -> Metric:
    family = (CounterMetricFamily if counted else GaugeMetricFamily)(name, help, labels=[label])
    for value, number in sorted(values.items()):
        family.add_metric([value], float(number))
    return family


F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)


class _Families:
    """Families of one label over the same rows: the first so many by name, or those with the most of something."""

    def __init__(self, label: str, rows: Sequence[Row], largest: str | None = None) -> None:
        ordered = rows if largest is None else sorted(rows, key=lambda row: -(row[largest] or 0))
        self._label = label
        self._own = sorted(ordered[:LABELS_MAX], key=lambda row: str(row[label]))
        self._others = ordered[LABELS_MAX:]

    def gauge(
        self, name: str, help: str, figure: Figure, fold: Callable[[Iterable[float]], float] = sum
    ) -> GaugeMetricFamily:
        return self._filled(GaugeMetricFamily(name, help, labels=[self._label]), figure, fold)

    def counter(self, name: str, help: str, figure: Figure) -> CounterMetricFamily:
        return self._filled(CounterMetricFamily(name, help, labels=[self._label]), figure, sum)

    def _filled(self, family: F, figure: Figure, fold: Callable[[Iterable[float]], float]) -> F:
        for row in self._own:
            if (value := figure(row)) is not None:
                family.add_metric([str(row[self._label])], float(value))
        others = [float(value) for row in self._others if (value := figure(row)) is not None]
        if others:
            family.add_metric([OTHERS], fold(others))
        return family


def _of(name: str) -> Figure:
    return lambda row: row.get(name)


def _seconds(name: str) -> Figure:
    return lambda row: None if row.get(name) is None else row[name] / 1000


def _total(name: str) -> Figure:
    return lambda row: sum(table[name] for table in row["tables"])
