"""The daemon and its tasks, as the daemon records them and any process reads them (catalog/daemon.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from floodmark.commit.catalog import Catalog
from floodmark.json_form import JsonObject, Reported, StoredError, stored_error


@dataclass(frozen=True)
class TaskReport(Reported):
    """Something that the daemon does again and again; `set_aside`: bad files that lie there, `bad_files` the newest."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "allow"}

    name: str
    kind: str
    state: str
    every_s: float | None = None
    last_started: str | None = None
    last_ended: str | None = None
    last_outcome: str | None = None
    last_error: StoredError | None = None
    failures: int = 0
    set_aside: int = 0
    bad_files: tuple[JsonObject, ...] = ()
    # Of a source: where it is, and which table it fills.
    about: JsonObject = field(default_factory=JsonObject)
    next_at: str | None = None


@dataclass(frozen=True)
class DaemonReport(Reported):
    """The process that runs the lake's tasks; not `alive`: it died, and these are its last words."""

    host: str
    pid: int
    since: str
    address: str | None
    alive: bool
    told: str
    tasks: tuple[TaskReport, ...]


# Fields that a daemon of a later version adds are unknown here.
_KNOWN = frozenset(one.name for one in fields(TaskReport))


def read_daemon(catalog: Catalog) -> DaemonReport | None:
    seen = catalog.daemon.seen()
    if seen is None:
        return None
    tasks = tuple(
        TaskReport(
            **{name: value for name, value in {"kind": "", **one}.items() if name in _KNOWN}
            | {
                "last_error": stored_error(one.get("last_error")),
                "bad_files": tuple(map(JsonObject, one.get("bad_files") or ())),
                "about": JsonObject(one.get("about") or {}),
            }
        )
        for one in seen["tasks"]
    )
    return DaemonReport(seen["host"], seen["pid"], seen["since"], seen["address"], seen["alive"], seen["told"], tasks)
