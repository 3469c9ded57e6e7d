"""Floodmark: a crash-safe, exactly-once lakehouse engine for Spark.

import floodmark as fm
lake = fm.open("./lake", create=True)
"""

from floodmark.errors import (
    BelowRetention,
    Busy,
    CommitUnknown,
    Conflict,
    Corrupt,
    Fenced,
    FloodmarkError,
    Incomplete,
    Invalid,
    NotFound,
    TooNew,
    Unavailable,
)
from floodmark.lake import Lake, open, restore
from floodmark.model import AuditRow, Commit, HealReport, TableCommit
from floodmark.write.transaction import Transaction

__version__ = "0.1.0"

__all__ = [
    "AuditRow",
    "BelowRetention",
    "Busy",
    "Commit",
    "CommitUnknown",
    "Conflict",
    "Corrupt",
    "Fenced",
    "FloodmarkError",
    "HealReport",
    "Incomplete",
    "Invalid",
    "Lake",
    "NotFound",
    "TableCommit",
    "TooNew",
    "Transaction",
    "Unavailable",
    "open",
    "restore",
]
