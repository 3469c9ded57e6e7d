"""References between tables, wanted against existing: pure.

A reference is stored in both tables, by ids (commit/references.py): so a plan for one of them changes the other too,
even if the file does not name it. Both get a schema of their own, of the same columns, so that every write that was
staged for either is planned again and sees the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from floodmark.catalog.maintenance_state import Policy
from floodmark.commit.references import Reference, no_reference, reference_property, referrer_property, referrers_of
from floodmark.schema.column_types import type_text
from floodmark.schema.step import ADD_REFERENCE, DROP_REFERENCE, DROP_TABLE, REFUSED, SAFE, SET_RETENTION, Step, refused
from floodmark.schema.table_plan import Link, TablePlan
from floodmark.write.current import Current


def diff_references(plans: Sequence[TablePlan], current: Mapping[str, Current]) -> tuple[TablePlan, ...]:
    """The plans with what references add to them, and plans for the tables that only a reference touches."""
    diff = _ReferenceDiff({plan.name: plan for plan in plans}, current)
    for name in list(diff.plans):
        diff.diff_table(name)
    for name in current:
        diff.check_types(name)
    for name in list(diff.plans):
        diff.check_parent(name)
    return tuple(diff.plans.values())


class _ReferenceDiff:
    def __init__(self, plans: dict[str, TablePlan], current: Mapping[str, Current]) -> None:
        self.plans = plans
        self.current = current

    def diff_table(self, name: str) -> None:
        plan = self.plans[name]
        have = {one.field_id: one for one in plan.current.references} if plan.current is not None else {}
        if plan.drop:
            for reference in have.values():
                self._let_go(name, reference)
            return
        if plan.rename_to is not None:
            self._rename(name, plan.rename_to)
            return
        if plan.wanted is None or plan.wanted.references is None or not self._exists(name):
            return
        ids = {field.name: field.field_id for field in plan.final_schema.fields}
        wanted = {}
        for column, (parent, parent_column) in plan.wanted.parents.items():
            if column not in ids:
                text, way = f"{column} refers to {parent}.{parent_column}", "Name a column of the table."
                self._step(name, refused(name, ADD_REFERENCE, column, text, f"there is no column {column}", way))
            else:
                wanted[ids[column]] = (column, parent, parent_column)
        for field_id, reference in have.items():
            if field_id not in wanted or not self._is_same(reference, *wanted[field_id][1:]):
                text = f"{self._name_of(plan, field_id)} refers to {reference.parent} no more"
                self._step(name, Step(name, DROP_REFERENCE, self._name_of(plan, field_id), SAFE, text))
                self._let_go(name, reference)
        for field_id, (column, parent, parent_column) in wanted.items():
            if field_id not in have or not self._is_same(have[field_id], parent, parent_column):
                self._add(name, field_id, column, parent, parent_column)

    def _name_of(self, plan: TablePlan, field_id: int) -> str:
        known = [*plan.final_schema.fields, *(plan.current.schema.fields if plan.current is not None else ())]
        return next((field.name for field in known if field.field_id == field_id), str(field_id))

    def _exists(self, name: str) -> bool:
        """Whether such a table will exist."""
        plan = self.plans.get(name)
        if plan is None:
            return name in self.current
        return not plan.drop and (plan.shape is not None or plan.current is not None)

    def _plan(self, name: str) -> TablePlan:
        """The plan of a table; an empty plan for a table that the file does not name."""
        return self.plans.get(name) or TablePlan(name, None, self.current[name])

    def _step(self, name: str, step: Step) -> None:
        plan = self._plan(name)
        self.plans[name] = replace(plan, steps=(*plan.steps, step))

    def _is_same(self, reference: Reference, parent: str, parent_column: str) -> bool:
        if not self._exists(parent):
            return False
        plan = self._plan(parent)
        if plan.current is None or plan.current.head.table_id != reference.parent_id:
            return False
        field = next((one for one in plan.final_schema.fields if one.name == parent_column), None)
        return field is not None and field.field_id == reference.parent_field_id

    def _add(self, name: str, field_id: int, column: str, parent: str, parent_column: str) -> None:
        text = f"{column} refers to {parent}.{parent_column}"
        plan = self.plans[name]
        problem = self._problem(plan, field_id, parent, parent_column)
        if problem is not None:
            self._step(name, refused(name, ADD_REFERENCE, column, text, *problem))
            return
        looked = "; its rows are checked first" if plan.current is not None else ""
        self._step(name, Step(name, ADD_REFERENCE, column, SAFE, text + looked))
        target = self._plan(parent).final_schema
        link = Link(field_id, parent, next(one.field_id for one in target.fields if one.name == parent_column))
        self.plans[name] = replace(self.plans[name], links=(*self.plans[name].links, link))
        self._touch(name)
        self._touch(parent)

    def _problem(self, plan: TablePlan, field_id: int, parent: str, parent_column: str) -> tuple[str, str] | None:
        if not self._exists(parent):
            return f"there is no table {parent}", "Declare it in the same file, or make it first."
        other = self._plan(parent)
        target = next((one for one in other.final_schema.fields if one.name == parent_column), None)
        keys = list(other.final_schema.identifier_field_ids)
        if target is None or keys != [target.field_id]:
            return f"{parent_column} is not the key of {parent}", "Refer to the only column of a table's key."
        source = plan.final_schema.find_field(field_id)
        if type_text(source.field_type) != type_text(target.field_type):
            words = f"{type_text(source.field_type)} and {type_text(target.field_type)}"
            return f"the columns are of different types: {words}", "Make both the same type."
        bound = [fill.field_id for fill in (plan.current.fills if plan.current is not None else ())]
        if field_id in bound:
            return "the column is filled by an expression", "Unbind it first."
        if self._policy(parent).retention is not None:
            return f"{parent} lets rows go by its retention", f'Set retention = "none" for {parent}.'
        return None

    def _policy(self, name: str) -> Policy:
        plan = self._plan(name)
        if plan.policy is not None:
            return plan.policy
        return plan.current.policy if plan.current is not None else Policy()

    def _let_go(self, name: str, reference: Reference) -> None:
        """Remove a reference from both tables; a dropped table needs no step."""
        mine, theirs = no_reference(reference)
        if not self.plans[name].drop:
            self._put(name, mine)
        parent = next((one for one, now in self.current.items() if now.head.table_id == reference.parent_id), None)
        if parent is not None and self._exists(parent):
            self._put(parent, theirs)

    def _rename(self, name: str, new_name: str) -> None:
        """The tables on the other side of a reference have its new name; its own properties have ids, and theirs."""
        mine = self.current[name].head.table_id
        for child, now in list(self.current.items()):
            for reference in now.references:
                if reference.parent_id == mine:
                    self._put(child, reference_property(replace(reference, parent=new_name)))
                if child == name and (parent := self._now_called(reference.parent_id)) is not None:
                    self._put(parent, referrer_property(reference, new_name))

    def _put(self, name: str, pair: tuple[str, str]) -> None:
        plan = self._plan(name)
        self.plans[name] = replace(plan, properties={**plan.properties, pair[0]: pair[1]})
        self._touch(name)

    def _touch(self, name: str) -> None:
        """A schema of its own, of the same columns: writes that were staged for the table are planned again."""
        plan = self._plan(name)
        if plan.current is not None and plan.schema is None and not plan.drop:
            number = plan.current.next_schema_id
            plan = replace(plan, schema=plan.current.schema.model_copy(update={"schema_id": number}))
        self.plans[name] = plan

    # ── references that stay ──

    def check_types(self, name: str) -> None:
        """A reference that stays needs both columns to keep one type, also if the file names one table only."""
        plan = self._plan(name)
        if plan.drop or plan.current is None:
            return
        for reference in plan.current.references:
            if reference.field_id in self._gone(plan):
                continue
            parent = next((one for one, now in self.current.items() if now.head.table_id == reference.parent_id), None)
            if parent is None or not self._exists(parent):
                continue
            mine = plan.final_schema.find_field(reference.field_id)
            theirs = self._plan(parent).final_schema.find_field(reference.parent_field_id)
            if type_text(mine.field_type) != type_text(theirs.field_type):
                text = f"{mine.name} refers to {parent}.{theirs.name}"
                words = f"{type_text(mine.field_type)} and {type_text(theirs.field_type)}"
                way = "Change the type of both in the same file."
                self._step(name, refused(name, ADD_REFERENCE, mine.name, text, f"it would be {words}", way))

    def _gone(self, plan: TablePlan) -> set[int]:
        """The columns of a table that refer to another one today, and will not."""
        if plan.current is None:
            return set()
        have = plan.current.references
        return {one.field_id for one in have if plan.properties.get(no_reference(one)[0][0]) == ""}

    def check_parent(self, name: str) -> None:
        """A table that others refer to must stay, and its retention must remove no row."""
        plan = self.plans[name]
        if plan.current is None:
            return
        children = [
            referrer
            for referrer in referrers_of(plan.current.metadata.properties)
            if not (self._is_gone(referrer.table_id, referrer.field_id))
        ]
        if not children:
            return
        names = ", ".join(sorted({self._now_called(child.table_id) or child.table for child in children}))
        reason, way = f"tables refer to it: {names}", "Take the references out first, or in the same file."
        if plan.drop:
            steps = tuple(
                replace(step, kind=REFUSED, reason=reason, way=way) if step.action == DROP_TABLE else step
                for step in plan.steps
            )
            self.plans[name] = replace(plan, steps=steps, drop=False)
        elif plan.policy is not None and plan.policy.retention is not None:
            steps = tuple(
                replace(step, kind=REFUSED, reason=reason, way=way) if step.action == SET_RETENTION else step
                for step in plan.steps
            )
            self.plans[name] = replace(plan, steps=steps)

    def _now_called(self, table_id: str) -> str | None:
        return next((name for name, now in self.current.items() if now.head.table_id == table_id), None)

    def _is_gone(self, table_id: str, field_id: int) -> bool:
        """Whether a reference that another table has today will not exist."""
        name = self._now_called(table_id)
        plan = None if name is None else self.plans.get(name)
        return plan is not None and (plan.drop or field_id in self._gone(plan))
