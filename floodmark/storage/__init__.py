"""Bytes: files of a lake on the local disk, in memory and on S3, by full location.

All bytes go through `Storage`. A name becomes visible whole or not at all (I3), and an acknowledged write is durable
(I4). PyIceberg's FileIO on top of it is in `floodmark.storage.fileio`, which this module does not import: a process
that only reads state must not pay for it.
"""

from floodmark.storage.counters import Counters
from floodmark.storage.held import Held
from floodmark.storage.local import TEMPORARY_PREFIX
from floodmark.storage.location import join, local_path, root_location
from floodmark.storage.store import Entry, Storage
from floodmark.storage.streams import OutputStream, RangeReader

__all__ = [
    "TEMPORARY_PREFIX",
    "Counters",
    "Entry",
    "Held",
    "OutputStream",
    "RangeReader",
    "Storage",
    "join",
    "local_path",
    "root_location",
]
