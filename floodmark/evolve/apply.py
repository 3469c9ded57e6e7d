"""Apply: all steps of a plan in one publish; the old shape of every table or the new one, never a mixture (I2).

A straight line of the protocol's steps. What was looked at in the rows, and what was filled, holds for the files that
were live then: if others came, the publish is refused, and only those are looked at or filled before the next try. What
needs no look is built on newer rows as it is: they are read by field id, so they are in the new shape.
Crash anywhere: nothing of it is true; a healer rolls it back, for it has no identity that would make it repeatable. A
turn that it held ends with its healing, or with its lease.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from floodmark import clock, log
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.journal import Operation
from floodmark.catalog.live import LiveFile, live_files
from floodmark.catalog.metadata import new_snapshot_id, schema_of
from floodmark.catalog.riders import PlanAgain
from floodmark.catalog.seal import DROP, Edit, Seal
from floodmark.errors import Conflict, Invalid
from floodmark.evolve.edits import Made, make_edits, make_riders
from floodmark.evolve.filling import Filling
from floodmark.evolve.look import look
from floodmark.evolve.plan import Plan, Seen, make_plan, seen
from floodmark.evolve.step import Step
from floodmark.failpoints import hit
from floodmark.model import Commit, Head
from floodmark.rows.runner import Runner
from floodmark.storage import join
from floodmark.write.intent import Intent
from floodmark.write.other_tables import tables_at_head
from floodmark.write.undo import delete_files, undo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KIND = "apply"
PLANS_MAX = 12
PLANS_BEFORE_TURN = 2
# Looking and filling read files, which takes longer than building; a healer ends the turn of a dead holder sooner.
PLAN_TURN_MS = 60_000


def apply_plan(
    catalog: Catalog,
    get_spark: Callable[[], SparkSession],
    intent: Intent,
    plan: Plan,
    *,
    again: Callable[[], Plan] | None = None,
    fill_later: bool = False,
    allow_destructive: bool = False,
    told: Callable[[Plan], None] | None = None,
) -> Commit:
    """Do what the plan says, in one version; `nothing_to_do` if that is nothing.

    `again` makes the plan anew: if tables moved meanwhile, and it has the same steps, they are done on the new state.
    Without it a plan is stale as soon as a table that it read moved: `Conflict`. `fill_later` leaves older rows without
    the defaults of new columns. Without `allow_destructive` a plan that loses data is `Invalid`. `told` gets the plan
    that was done, or found to be nothing.
    """
    _check_steps(plan.refused)
    _check_destructive(plan, allow_destructive)
    if plan.outcome == "nothing_to_do":
        if told is not None:
            told(plan)
        return _unchanged(catalog, intent)
    if fill_later:
        _check_fill_later(plan, {table.name: table.current.head for table in plan.tables if table.current is not None})
    applied = _Apply(catalog, get_spark, intent, plan, again, fill_later, allow_destructive)
    commit = applied.run()
    if told is not None:
        told(applied.plan)
    return commit


class _Apply:
    def __init__(
        self,
        catalog: Catalog,
        get_spark: Callable[[], SparkSession],
        intent: Intent,
        plan: Plan,
        again: Callable[[], Plan] | None,
        fill_later: bool,
        allow_destructive: bool,
    ) -> None:
        self._catalog = catalog
        self._intent = intent
        self._plan = plan
        self._again = again
        self._allow_destructive = allow_destructive
        # Chosen once: every try makes the same tables and the same snapshots.
        self._made = {table.name: _made(catalog, table.name) for table in plan.tables if table.shape is not None}
        self._snapshots = {table.name: new_snapshot_id() for table in plan.tables}
        self._operation = self._begin()
        self._runner = Runner(catalog.storage, get_spark, self._operation.id)
        others = tables_at_head(catalog, get_spark, intent.branch)
        self._filling = None if fill_later else Filling(catalog, self._runner, self._operation, others)
        # By table, the files that the newest try looked at or filled.
        self._known: dict[str, frozenset[str]] = {}
        self._log = log.get(self._operation.id, kind=KIND)

    @property
    def plan(self) -> Plan:
        """The newest that was made."""
        return self._plan

    def run(self) -> Commit:
        # Crash here: a row in the journal, no file; healing rolls it back.
        hit("apply.begun")
        try:
            return self._run()
        except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
            return undo(self._catalog, self._operation, error, certain=not self._runner.used_spark)
        finally:
            self._catalog.journal.active.discard(self._operation.id)

    def _begin(self) -> Operation:
        there = [table.current.metadata.location for table in self._plan.tables if table.current is not None]
        return self._catalog.journal.begin(
            KIND,
            branch=self._intent.branch,
            actor=self._intent.actor,
            message=self._intent.message,
            table_locations=[*there, *(made.location for made in self._made.values())],
        )

    def _run(self) -> Commit:
        for plans in range(1, PLANS_MAX + 1):
            heads = self._heads()
            # It is planned anew at every try: not all that it stands on is to be seen in heads.
            if self._moved(heads, rows_matter=plans == 1) or plans > 1:
                commit = self._plan_anew()
                if commit is not None:
                    return commit
                heads = self._heads()
                if self._moved(heads, rows_matter=False):
                    continue  # again while it was planned
            edits = self._look_and_fill(heads)
            # Crash here: files in the operation's own folders; healing deletes them (I3, I10).
            hit("apply.rewritten")
            seal = Seal(edits, make_riders(self._plan, heads, self._made))
            sealed_apart = self._catalog.journal.seal(self._operation, seal)
            # Crash here: not repeatable, so a healer undoes it.
            hit("apply.sealed")
            leftovers = plans > 1 or sealed_apart or self._runner.used_spark
            try:
                return self._catalog.door.publish(
                    self._operation, seal, points=KIND, leftovers=leftovers, recheck=self._recheck
                )
            except PlanAgain as moved:
                self._log.info("planning again", table=moved.table, reason=moved.reason, plans=plans)
            if plans >= PLANS_BEFORE_TURN:
                ids = [edit.table_id for edit in edits]
                self._catalog.door.turns.take(self._operation.id, ids, PLAN_TURN_MS)
            # Crash here: the seal of a plan that does not hold any more; no healer publishes it.
            hit("apply.planned_again")
        raise Conflict(
            "the tables kept changing under this plan",
            plans=PLANS_MAX,
            advice="Run it again when there are fewer writers.",
        )

    # ── the state it stands on ──

    def _heads(self) -> dict[str, Head]:
        return {head.table: head for head in self._catalog.history.heads(self._intent.branch)}

    def _moved(self, heads: dict[str, Head], *, rows_matter: bool) -> bool:
        """Whether a table that the plan read is another now; from the second try on, by its shape only.

        Rows that came since then are looked at and filled by the next try. A table that is to go is one that was seen
        to the last row.
        """
        gone = {table.name for table in self._plan.tables if table.drop}
        for planned in self._plan.heads:
            now = seen(planned[0], heads.get(planned[0]))
            whole = rows_matter or planned[0] in gone
            if now != planned and (whole or _shape(now) != _shape(planned)):
                return self._is_stale(planned[0], _seen_text(planned), _seen_text(now))
        # A table that lets rows go by age cannot be referred to.
        parents = {link.parent for table in self._plan.tables for link in table.links}
        for table in self._plan.tables:
            matters = table.policy is not None or table.moves_names or table.name in parents
            if matters and table.current is not None:
                planned_policy, policy = table.current.policy, self._catalog.upkeep.policy(table.current.head.table_id)
                if policy != planned_policy:
                    return self._is_stale(table.name, f"keeps {planned_policy.retention}", f"keeps {policy.retention}")
        return False

    def _is_stale(self, table: str, planned: str, now: str) -> bool:
        if self._again is not None:
            return True
        raise Conflict(
            "the lake moved since the plan was made",
            table=table,
            planned=planned,
            now=now,
            advice="Make the plan again, and look at it.",
        )

    def _plan_anew(self) -> Commit | None:
        """Plan on the state that is there now. Returns what there is to say if somebody else has done it."""
        if self._again is None:
            self._plan = self._the_same_again()
            return None
        plan = self._again()
        if plan.outcome == "nothing_to_do":
            self._plan = plan
            operation, _ = self._catalog.journal.abandon(self._operation.id)
            if operation is not None:
                delete_files(self._catalog, operation, certain=not self._runner.used_spark)
            return _unchanged(self._catalog, self._intent)
        _check_steps(plan.refused)
        _check_destructive(plan, self._allow_destructive)
        if _actions(plan) != _actions(self._plan) or _places(plan) != _places(self._plan):
            raise Conflict("the plan changed while it was applied", advice="Run it again.")
        self._plan = plan
        return None

    def _the_same_again(self) -> Plan:
        """A plan that was agreed to, on the state that is there now; stale if it would be another one."""
        wanted = [table.wanted for table in self._plan.tables if table.wanted is not None]
        plan = make_plan(self._catalog, wanted, self._plan.origin)
        if plan.refused:
            first = plan.refused[0]
            self._is_stale(first.table, "all steps can be done", f"{first.text}: {first.reason}")
        _check_destructive(plan, self._allow_destructive)
        if plan.contents != self._plan.contents:
            before = {table.name: table.contents() for table in self._plan.tables if table.changes}
            after = {table.name: table.contents() for table in plan.tables if table.changes}
            name = next(one for one in sorted({*before, *after}) if before.get(one) != after.get(one))
            self._is_stale(name, f"plan {self._plan.contents}", f"plan {plan.contents}")
        # What it saw stays what somebody agreed to.
        return replace(plan, heads=self._plan.heads)

    # ── rows ──

    def _look_and_fill(self, heads: dict[str, Head]) -> tuple[Edit, ...]:
        if self._filling is None:
            _check_fill_later(self._plan, heads)
        files = {table.name: self._live(heads[table.name]) for table in self._plan.tables if table.current is not None}
        parents = {link.parent for table in self._plan.tables for link in table.links}
        looked = {table.name for table in self._plan.tables if table.looks} | parents
        before = {name: known for name, known in self._known.items() if name in looked}
        self._known = {name: frozenset(file.path for file in files[name]) for name in looked & set(files)}
        if self._known != before:
            _check_steps(look(self._catalog.storage, self._plan, files))
        filled = {
            table.name: self._filling.fill(table, heads[table.name], files[table.name])
            for table in self._plan.tables
            if table.fills and table.current is not None and self._filling is not None
        }
        return make_edits(self._plan, heads, self._made, self._snapshots, filled, frozenset(self._known))

    def _live(self, head: Head) -> list[LiveFile]:
        metadata = self._catalog.files.metadata(head.metadata_location)
        return live_files(self._catalog.files, head, schema_of(metadata, head))

    def _recheck(self, edit: Edit, head: Head) -> None:
        """A table that rows were looked at in, or that is to go, has another snapshot than then."""
        if edit.action == DROP:
            raise PlanAgain(edit.table, "rows came to a table that was to go")
        if frozenset(self._catalog.files.data_files(head)) != self._known.get(edit.table):
            raise PlanAgain(edit.table, "files came that nobody has looked at")


def _made(catalog: Catalog, name: str) -> Made:
    table_id = str(uuid.uuid4())
    return Made(table_id, join(catalog.location, "tables", f"{name}.{table_id[:8]}"))


def _actions(plan: Plan) -> list[tuple[str, str, str | None]]:
    """What the plan does; not how many rows that concerns."""
    return [(step.table, step.action, step.column) for step in plan.steps]


def _places(plan: Plan) -> list[tuple[str, str | None]]:
    """Where each table is: the operation has claimed its folders there."""
    return [(one.name, None if one.current is None else one.current.metadata.location) for one in plan.tables]


def _shape(state: Seen) -> tuple[str | None, int, int]:
    return state[1], state[3], state[4]


def _seen_text(state: Seen) -> str:
    return "none" if state[1] is None else f"snapshot {state[2]}, schema {state[3]}, spec {state[4]}"


def _check_steps(refused: Sequence[Step]) -> None:
    if refused:
        first = refused[0]
        raise Invalid(
            "the plan has steps that cannot be done" if len(refused) > 1 else "the plan has a step that cannot be done",
            steps="; ".join(f"{step.table}: {step.text}: {step.reason}" for step in refused),
            advice=first.way,
        )


def _check_destructive(plan: Plan, allowed: bool) -> None:
    if plan.destructive and not allowed:
        flag = "--allow-destructive"
        # Of tables out of settings the file is not known here; a command without it could mean another one.
        again = f"`{shlex.join(['floodmark', 'apply', plan.file, flag])}`" if plan.file else f"{flag} with the command"
        raise Invalid(
            "the plan has steps that lose data" if len(plan.destructive) > 1 else "the plan has a step that loses data",
            steps="; ".join(f"{step.table}: {step.text}" for step in plan.destructive),
            advice=f"If that is what you want: {again}, allow_destructive=True in Python.",
        )


def _check_fill_later(plan: Plan, heads: Mapping[str, Head]) -> None:
    for table in plan.tables:
        for fill in table.fills:
            column = table.final_schema.find_field(fill.field_id)
            if column.required and table.current is not None and heads[table.name].rows:
                raise Invalid(
                    "a column that is never null cannot be filled later",
                    table=table.name,
                    column=column.name,
                    advice="Leave `required` out until it is filled, or fill it now.",
                )


def _unchanged(catalog: Catalog, intent: Intent) -> Commit:
    version = catalog.history.resolve(branch=intent.branch)
    now = clock.now_ms()
    return Commit(version, "nothing_to_do", None, KIND, intent.branch, intent.actor, intent.message, now)
