"""Floodmark: a crash-safe, exactly-once lakehouse engine for Spark.

import floodmark as fm
lake = fm.open("./lake", create=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from floodmark.version import __version__ as __version__

if TYPE_CHECKING:
    from floodmark.branches.records import BranchDiff, Merged, RollbackPlan, RolledBack
    from floodmark.commit.branches import Branch
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
        MergeConflict,
        NotFound,
        TooNew,
        TooOld,
        Unavailable,
    )
    from floodmark.lake import Lake
    from floodmark.model import AuditRow, Commit, RecoveryReport, TableCommit
    from floodmark.opening import open, restore
    from floodmark.repair.repair import Repair
    from floodmark.schema.plan import Plan
    from floodmark.write.transaction import Transaction

__all__ = [
    "AuditRow",
    "BelowRetention",
    "Branch",
    "BranchDiff",
    "Busy",
    "Commit",
    "CommitUnknown",
    "Conflict",
    "Corrupt",
    "Fenced",
    "FloodmarkError",
    "Incomplete",
    "Invalid",
    "Lake",
    "MergeConflict",
    "Merged",
    "NotFound",
    "Plan",
    "RecoveryReport",
    "Repair",
    "RollbackPlan",
    "RolledBack",
    "TableCommit",
    "TooNew",
    "TooOld",
    "Transaction",
    "Unavailable",
    "open",
    "restore",
]

_ROOMS = {
    "floodmark.lake": ("Lake",),
    "floodmark.opening": ("open", "restore"),
    "floodmark.model": ("AuditRow", "Commit", "RecoveryReport", "TableCommit"),
    "floodmark.write.transaction": ("Transaction",),
    "floodmark.branches.records": ("BranchDiff", "Merged", "RollbackPlan", "RolledBack"),
    "floodmark.commit.branches": ("Branch",),
    "floodmark.schema.plan": ("Plan",),
    "floodmark.repair.repair": ("Repair",),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}


def __dir__() -> list[str]:
    """What is for users; names that were not asked for yet too."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """Names come from their rooms when they are asked for: who needs one room does not wait for all."""
    if name not in __all__:
        raise AttributeError(f"module 'floodmark' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "floodmark.errors")), name)
