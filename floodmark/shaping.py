"""The lake's shape as code: a plan of what a file wants, and its one publish. A part of `Lake`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from floodmark.catalog.catalog import Catalog
from floodmark.commit.intent import Intent
from floodmark.engine import Engine
from floodmark.errors import Conflict
from floodmark.model import Commit

if TYPE_CHECKING:
    from floodmark.evolve.file import WantedTable
    from floodmark.evolve.plan import Plan
    from floodmark.write.undrop import Undropped

# A file that declares tables, what tomllib reads from it, or what it holds under `tables`.
Source = str | os.PathLike[str] | Mapping[str, Any]


class Shaping(ABC):
    catalog: Catalog
    engine: Engine

    def plan(self, source: Source, *, check: bool = True) -> Plan:
        """What it takes to give main the tables that a file declares, in steps.

        Each is safe, needs a rewrite, is destructive (loses data), or is refused.

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
        allow_destructive: bool = False,
        actor: str | None = None,
        message: str = "",
        told: Callable[[Plan], None] | None = None,
    ) -> Commit:
        """Do all of it in one version; `nothing_to_do` if the tables are like that already.

        Of a Plan, exactly that: `Conflict` if a table that it read has moved since. Of a file, what it takes now;
        `expect` is the id of the plan that this must be. `fill_later`: rows that are there stay without the defaults
        of new columns, until a backfill fills them. `allow_destructive`: also steps that lose data (tables and columns
        that go, a retention that lets more rows go); without it they are `Invalid`. `told` gets the plan that was done
        in the end: of a file, it is made anew if tables moved meanwhile.
        """
        from floodmark.evolve.apply import apply_plan
        from floodmark.evolve.plan import Plan, make_plan

        self.engine.get_ready()
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
        return apply_plan(
            self.engine,
            intent,
            plan,
            again=again,
            fill_later=fill_later,
            allow_destructive=allow_destructive,
            told=told,
        )

    def plan_drop(self, table: str) -> Plan:
        """What drop_table would do now; its one step is refused if something needs the table. Changes nothing."""
        self.catalog.history.head(table)
        return self.plan({table: {"drop": True}})

    def drop_table(self, table: str, *, actor: str | None = None, message: str = "") -> Commit:
        """Drop a table from main. Older versions keep it, and `undrop` brings it back, until they expire.

        Refused while a sink follows it, a backfill works on it, a branch has it, or a table refers to it.
        """
        self.engine.get_ready()
        self.catalog.history.head(table)
        wanted = {table: {"drop": True}}
        return self.apply(wanted, allow_destructive=True, actor=actor, message=message or f"drop {table}")

    def undrop(
        self,
        table: str,
        *,
        version: int | None = None,
        actor: str | None = None,
        message: str = "",
        told: Callable[[Undropped], None] | None = None,
    ) -> Commit:
        """Bring a dropped table back as it was: the same table id and sequences, and its marks and batch ids go on.

        `BelowRetention` once no version that has it can be read; `Invalid` if its name is taken. `version`: one that
        has the table, if several had this name. Its references to other tables are not checked any more, until `apply`
        declares them again. `told` gets what came back.
        """
        from floodmark.write.undrop import undrop

        self.engine.get_ready()
        intent = self._intent("undrop", actor, message or f"undrop {table}")
        return undrop(self.catalog, intent, table, version, told)

    @abstractmethod
    def _intent(self, kind: str, actor: str | None, message: str) -> Intent: ...


def _read(source: Source) -> tuple[tuple[WantedTable, ...], str]:
    from floodmark.evolve.file import read_wanted, tables_of, wanted_tables
    from floodmark.evolve.plan import GIVEN

    if isinstance(source, Mapping):
        origin = GIVEN
        return wanted_tables(tables_of(source, origin), origin), origin
    return read_wanted(source), os.fspath(source)
