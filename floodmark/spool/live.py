"""The spools that this process has open, by folder: who asks here need not look into files that we know by heart."""

from __future__ import annotations

import threading
from pathlib import Path

from floodmark.spool.spool import Look, Spool, look

_open: dict[Path, Spool] = {}
_lock = threading.Lock()


def opened(spool: Spool) -> None:
    with _lock:
        _open[spool.folder] = spool


def closed(spool: Spool) -> None:
    with _lock:
        if _open.get(spool.folder) is spool:
            del _open[spool.folder]


def look_here(folder: Path, position: int) -> Look:
    """What is in a spool: as this process knows, if it has it open, or by a look from outside; the answer is one."""
    with _lock:
        spool = _open.get(folder)
    if spool is None or not spool.first <= position <= spool.end:
        return look(folder, position)
    about = spool.about
    return Look(about.spool, about.table_id, about.incarnation, spool.first, spool.end, spool.waiting(position))
