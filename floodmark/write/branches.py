"""Branches as a user holds them (`lake.branches`): made, listed, compared, merged and deleted.

Making and deleting one is a transaction of the catalog that copies nothing; a merge is an operation like every write.
What only looks (list, get, diff, a dry run) works on a lake that is open read-only, and changes nothing (I17).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from floodmark import clock
from floodmark.catalog.branches import Branch
from floodmark.catalog.catalog import Catalog
from floodmark.errors import Invalid
from floodmark.write.branch_plan import OURS, THEIRS
from floodmark.write.branch_records import BranchDiff, Merged
from floodmark.write.intent import Intent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class LakeBranches:
    def __init__(
        self, catalog: Catalog, get_spark: Callable[[], SparkSession], actor: str, ready: Callable[[], None]
    ) -> None:
        self._catalog = catalog
        self._get_spark = get_spark
        self._actor = actor
        self._ready = ready

    def create(
        self,
        name: str,
        *,
        source: str | None = None,
        version: int | None = None,
        at: str | datetime | None = None,
    ) -> Branch:
        """Make a branch from the head of `source` (main), from a version, or from how it was at a time."""
        at_ms = None if at is None else clock.parse_time_ms(at)
        self._ready()
        return self._catalog.branches.create(name, source=source, version=version, at_ms=at_ms, actor=self._actor)

    def list(self) -> builtins.list[Branch]:
        return self._catalog.branches.list()

    def get(self, name: str) -> Branch:
        return self._catalog.branches.get(name)

    def delete(self, name: str) -> Branch:
        """End a branch: what was never merged goes with its versions' window. A merge under way ends in Conflict."""
        self._ready()
        return self._catalog.branches.delete(name)

    def diff(self, name: str, *, table: str | None = None, limit: int = 20) -> BranchDiff:
        """What the branch has that its parent does not know yet: per table, with at most `limit` rows of each."""
        from floodmark.write.branch_diff import diff

        _check_limit(limit)
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
    ) -> Merged:
        """Bring a branch's changes into its parent, or with `into` the parent's into the branch: one version.

        Conflicts change nothing and are in the answer (at most `limit` of them), unless `prefer` settles them: `ours`
        is the branch merged into, `theirs` the one merged.
        """
        from floodmark.write.branch_merge import KIND, Wish, merge, plan_merge

        _check_limit(limit)
        if prefer not in (None, OURS, THEIRS):
            raise Invalid("prefer is not known", prefer=prefer, advice='Use "ours" or "theirs", or leave it out.')
        target = into or self._catalog.branches.get(name).parent
        if target is None:
            raise Invalid(
                "this branch was not made from another", branch=name, advice="Say where it goes: into=BRANCH."
            )
        wish = Wish(name, target, prefer, limit)
        if dry_run:
            return plan_merge(self._catalog, wish)
        intent = Intent(KIND, target, actor or self._actor, message)
        self._ready()
        return merge(self._catalog, self._get_spark, wish, intent)


def _check_limit(limit: int) -> None:
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise Invalid("a limit is a number of rows", limit=limit)
