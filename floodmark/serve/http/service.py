"""What a server serves: the lake, who may use it, within which limits, and where rows wait before they are in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from floodmark.lake import Lake
from floodmark.serve.http.access import Access
from floodmark.serve.http.body import RequestLimits
from floodmark.serve.http.readiness import StoreWatch
from floodmark.serve.http.workers import Workers
from floodmark.settings.settings import MaintainSettings

if TYPE_CHECKING:
    from floodmark.ingest.intake import Intake


@dataclass
class Service:
    """All that the parts of the app need. Without `intake` rows are taken only where their caller waits for them."""

    lake: Lake
    access: Access = field(default_factory=Access)
    limits: RequestLimits = field(default_factory=RequestLimits)
    intake: Intake | None = None
    keeping: MaintainSettings = field(default_factory=MaintainSettings)
    workers: Workers = field(init=False)
    # None for a lake that is only read: nothing is written to its store, not even a probe (I17).
    store: StoreWatch | None = field(init=False)

    def __post_init__(self) -> None:
        self.store = None if self.lake.read_only else StoreWatch(self.lake)
        self.workers = Workers(self.limits)
