"""The result of a run of maintenance: a record per verb and table, one outcome for all, an exit code (I12)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from floodmark import log
from floodmark.catalog.maintenance_state import Maintenance
from floodmark.errors import Conflict, FloodmarkError
from floodmark.json_form import Json
from floodmark.model import Head
from floodmark.runs import BELOW_THRESHOLD, CONFLICT, FAILED, NOTHING_TO_DO, PARTIAL, PROTECTED, REFUSED

COMPACT, RETAIN, INDEX, EXPIRE, SWEEP, SWEEP_DEEP = "compact", "retain", "index", "expire", "sweep", "sweep_deep"
VERBS = (RETAIN, COMPACT, INDEX, EXPIRE, SWEEP)
# On tables that a sink ships to, in their own catalog.
SINK_COMPACT, SINK_EXPIRE, SINK_SWEEP = "sink_compact", "sink_expire", "sink_sweep"
SINK_VERBS = (SINK_COMPACT, SINK_EXPIRE, SINK_SWEEP)
# The outcome of a run over several tables: the first of these that a table has, else the first that did something.
_GRAVE = (REFUSED, FAILED, CONFLICT, PARTIAL)
_IDLE = (NOTHING_TO_DO, BELOW_THRESHOLD, PROTECTED)
_EXIT = {CONFLICT: 3, PARTIAL: 3, REFUSED: 5}


@dataclass(frozen=True)
class MaintenanceRun:
    """What one call of maintenance did: a record per verb and table."""

    records: tuple[Maintenance, ...] = ()

    @property
    def outcome(self) -> str:
        found = [record.outcome for record in self.records]
        grave = [one for one in _GRAVE if one in found]
        if grave and any(one not in _GRAVE and one not in _IDLE for one in found):
            return PARTIAL
        if grave:
            return grave[0]
        busy = [one for one in found if one not in _IDLE]
        return busy[0] if busy else next((one for one in reversed(_IDLE) if one in found), NOTHING_TO_DO)

    @property
    def exit_code(self) -> int:
        """0 if nothing failed; else the exit code of the gravest record."""
        graves = [record for record in self.records if record.outcome in _GRAVE]
        if not graves:
            return 0
        worst = min(graves, key=lambda record: _GRAVE.index(record.outcome))
        return int(worst.detail.get("exit_code", _EXIT.get(worst.outcome, 1)))

    def as_dict(self) -> dict[str, Json]:
        return {"outcome": self.outcome, "records": [record.as_dict() for record in self.records]}


@dataclass
class VerbRun:
    """A verb at work on a table: the record gets its fields when it ends."""

    verb: str
    head: Head | None
    outcome: str = NOTHING_TO_DO
    detail: dict[str, Json] = field(default_factory=dict)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The edge of a run: every error inside becomes its outcome."""
        try:
            yield
        except Conflict as error:
            self.failed(error, CONFLICT)
        except FloodmarkError as error:
            self.failed(error, FAILED)
        except Exception as error:  # noqa: BLE001 - the edge: the next table follows, and the trace is in the log
            log.get().exception("maintenance failed", verb=self.verb, table=self.head.table if self.head else None)
            self.outcome = FAILED
            self.detail |= {"error": type(error).__name__, "message": str(error), "exit_code": 1}

    def failed(self, error: FloodmarkError, outcome: str) -> VerbRun:
        self.outcome = outcome
        self.detail |= {"error": error.kind, "message": str(error), "exit_code": error.exit_code}
        return self

    def maintenance(self, actor: str, started_ms: int) -> Maintenance:
        head = self.head
        table, table_id = (head.table, head.table_id) if head is not None else ("", "")
        return Maintenance(self.verb, table, self.outcome, self.detail, table_id, actor, started_ms, started_ms)
