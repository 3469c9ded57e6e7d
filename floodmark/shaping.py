"""The lake's shape as code: a plan of what a file wants, and its one publish. A part of `Lake`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from floodmark.catalog.catalog import Catalog
from floodmark.errors import Conflict
from floodmark.model import Commit
from floodmark.rows.session import Sessions
from floodmark.write.intent import Intent

if TYPE_CHECKING:
    from floodmark.evolve.file import WantedTable
    from floodmark.evolve.plan import Plan

# A file that declares tables, or what such a file holds under `tables`.
Source = str | os.PathLike[str] | Mapping[str, Any]


class Shaping(ABC):
    catalog: Catalog
    sessions: Sessions

    def plan(self, source: Source, *, check: bool = True) -> Plan:
        """What it takes to give main the tables that a file declares: steps, each safe, a rewrite, or refused.

        Changes nothing. `check` looks at rows too, where a step depends on them: keys, nulls, references.
        """
        from floodmark.evolve.look import checked_plan
        from floodmark.evolve.plan import make_plan

        wanted, origin = _read(source)
        plan = make_plan(self.catalog, wanted, origin)
        return checked_plan(self.catalog, plan) if check else plan

    def apply(
        self,
        source: Source | Plan,
        *,
        expect: str | None = None,
        fill_later: bool = False,
        actor: str | None = None,
        message: str = "",
        told: Callable[[Plan], None] | None = None,
    ) -> Commit:
        """Do all of it in one version; `nothing_to_do` if the tables are like that already.

        Of a Plan, exactly that: `Conflict` if a table that it read has moved since. Of a file, what it takes now;
        `expect` is the id of the plan that this must be. `fill_later`: rows that are there stay without the defaults
        of new columns, until a backfill fills them. `told` gets the plan that was done in the end: of a file, it is
        made anew if tables moved meanwhile.
        """
        from floodmark.evolve.apply import apply_plan
        from floodmark.evolve.plan import Plan, make_plan

        self._ready_to_write()
        again: Callable[[], Plan] | None = None
        if isinstance(source, Plan):
            plan = source
        else:
            wanted, origin = _read(source)
            plan = make_plan(self.catalog, wanted, origin)
            if expect is None:
                again = lambda: make_plan(self.catalog, wanted, origin)  # noqa: E731
        if expect is not None and plan.id != expect:
            raise Conflict(
                "this is not the plan that was expected",
                plan=plan.id,
                expected=expect,
                advice="The file or the lake changed since then: make the plan again, and look at it.",
            )
        intent = self._intent("apply", actor, message or f"apply {plan.origin}")
        return apply_plan(self.catalog, self.sessions.get, intent, plan, again=again, fill_later=fill_later, told=told)

    @abstractmethod
    def _ready_to_write(self) -> None: ...

    @abstractmethod
    def _intent(self, kind: str, actor: str | None, message: str) -> Intent: ...


def _read(source: Source) -> tuple[tuple[WantedTable, ...], str]:
    from floodmark.evolve.file import read_wanted, wanted_tables

    if isinstance(source, Mapping):
        return wanted_tables(source, "the tables given"), "the tables given"
    return read_wanted(source), os.fspath(source)
