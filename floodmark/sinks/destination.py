"""The destination of a sink: one class per kind, all with the same few verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from floodmark.catalog.unit import Shipped, Unit, UnitLog, Watch
from floodmark.rows.reading.shipment import Shipment
from floodmark.rows.session import Sessions
from floodmark.sinks.settings import AnySettings, FilesSettings, HttpSettings
from floodmark.storage import Storage

if TYPE_CHECKING:
    pass


class Destination(Protocol):
    def ship(self, unit: Unit, shipment: Shipment, log: UnitLog, watch: Watch) -> Shipped:
        """Ship every part of the unit that is not acknowledged yet, and acknowledge it."""


def open_destination(settings: AnySettings, storage: Storage, sessions: Sessions) -> Destination:
    if isinstance(settings, HttpSettings):
        from floodmark.sinks.http.destination import HttpDestination

        return HttpDestination(settings, storage, sessions)
    if isinstance(settings, FilesSettings):
        from floodmark.sinks.files.destination import FilesDestination

        return FilesDestination(settings, storage, sessions)
    from floodmark.sinks.iceberg.destination import IcebergDestination

    return IcebergDestination(settings, storage, sessions)
