"""Branches as a user has them (`lake.branches`): created, listed, compared, merged and deleted.

Creating or deleting one is a transaction of the catalog that copies nothing; a merge is an operation like every write.
Verbs that only read (list, get, diff, a dry run) work on a lake that is open read-only, and change nothing (I17).
"""

from __future__ import annotations

import builtins
from datetime import datetime

from floodmark import clock
from floodmark.branches.plan import OURS, THEIRS
from floodmark.branches.records import IN_CONFLICT, BranchDiff, Merged
from floodmark.commit.branches import Branch
from floodmark.commit.intent import Intent
from floodmark.engine import Engine
from floodmark.errors import Invalid, MergeConflict

# What a merge does about conflicts.
RAISE, RETURN = "raise", "return"


class LakeBranches:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._catalog = engine.catalog

    def __repr__(self) -> str:
        return f"<lake.branches of {self._catalog.location}: create, merge, diff, list, delete>"

    def create(
        self,
        name: str,
        *,
        source: str | None = None,
        version: int | None = None,
        at: str | datetime | None = None,
    ) -> Branch:
        """Create a branch from the head of `source` (main), from a version, or from its state at a time."""
        at_ms = None if at is None else clock.parse_time_ms(at)
        self._engine.get_ready()
        return self._catalog.branches.create(
            name, source=source, version=version, at_ms=at_ms, actor=self._engine.actor
        )

    def list(self) -> builtins.list[Branch]:
        """Every branch, with its base and head."""
        return self._catalog.branches.list()

    def get(self, name: str) -> Branch:
        """One branch by its name; NotFound if none has it."""
        return self._catalog.branches.get(name)

    def delete(self, name: str) -> Branch:
        """End a branch: changes that were never merged expire with its versions. A running merge ends in Conflict."""
        self._engine.get_ready()
        return self._catalog.branches.delete(name)

    def diff(self, name: str, *, table: str | None = None, limit: int = 20) -> BranchDiff:
        """What the branch has and its parent does not have yet: per table, with at most `limit` rows of each."""
        from floodmark.branches.diff import diff

        check_limit(limit)
        return diff(self._catalog, name, table=table, limit=limit)

    def merge(
        self,
        name: str,
        *,
        into: str | None = None,
        prefer: str | None = None,
        dry_run: bool = False,
        actor: str | None = None,
        message: str = "",
        limit: int = 1000,
        on_conflict: str = RAISE,
        if_version: int | None = None,
    ) -> Merged:
        """Merge a branch's changes into its parent, or with `into` the parent's into the branch: one version.

        Conflicts change nothing and raise MergeConflict, which holds them as data (at most `limit` of them); with
        on_conflict="return", and in a dry run, the result holds them instead. `prefer` settles them: `ours` is the
        branch merged into, `theirs` the one merged. `if_version`: every table that the merge changes or decides about
        must be, on both branches, as it was at that version; else `Conflict`, whatever on_conflict is.
        """
        from floodmark.branches.merge import KIND, MergeRequest, merge, plan_merge

        check_limit(limit)
        if prefer not in (None, OURS, THEIRS):
            raise Invalid("unknown value of prefer", prefer=prefer, advice='Use "ours" or "theirs", or leave it out.')
        if on_conflict not in (RAISE, RETURN):
            raise Invalid("unknown value of on_conflict", on_conflict=on_conflict, advice='Use "raise" or "return".')
        target = into or self._catalog.branches.get(name).parent
        if target is None:
            raise Invalid("this branch was not made from another", branch=name, advice="Name the target: into=BRANCH.")
        wish = MergeRequest(name, target, prefer, limit)
        intent = Intent(KIND, target, actor or self._engine.actor, message, if_version=if_version)
        if dry_run:
            return plan_merge(self._catalog, wish, intent)
        self._engine.get_ready()
        merged = merge(self._engine, wish, intent)
        if merged.outcome == IN_CONFLICT and on_conflict == RAISE:
            raise _in_conflict(merged)
        return merged


def _in_conflict(merged: Merged) -> MergeConflict:
    reasons = sorted({conflict.reason for conflict in merged.conflicts})
    return MergeConflict(
        "both branches made conflicting changes",
        merged=merged,
        source=merged.source,
        target=merged.target,
        tables=", ".join(sorted({conflict.table for conflict in merged.conflicts})),
        reasons=", ".join(reasons),
        advice='Nothing was changed. Look at error.conflicts; merge with prefer="ours" or "theirs", or change a side.',
    )


def check_limit(limit: int) -> None:
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise Invalid("the limit must be a number of rows", limit=limit)
