"""How a caller stops a run of a sink and follows its progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from floodmark.catalog.unit import Stopped

Progress = Callable[[str, int, int, int], None]


@dataclass
class RunWatch:
    """How a caller stops a run and follows its progress: `progress(table, rows, maximum rows, bytes)`."""

    stop: threading.Event = field(default_factory=threading.Event)
    on_progress: Progress | None = None
    table: str = ""
    rows: int = 0
    rows_max: int = 0
    size_bytes: int = 0

    def begin(self, table: str, rows_max: int) -> None:
        self.table, self.rows, self.rows_max, self.size_bytes = table, 0, rows_max, 0
        self.progress(0, 0)

    def progress(self, rows: int, size_bytes: int) -> None:
        self.rows, self.size_bytes = self.rows + rows, self.size_bytes + size_bytes
        if self.on_progress is not None:
            self.on_progress(self.table, self.rows, self.rows_max, self.size_bytes)

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def wait(self, seconds: float) -> bool:
        return self.stop.wait(seconds)
