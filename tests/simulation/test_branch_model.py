"""Random work on main and up to three branches against a model: dicts of what every branch and every version must hold.

Writes of every kind, columns that get other names, branches made from heads and from old versions, merged both ways,
deleted; compaction, and expiry with a sweep that deletes at once whatever it may: a file that somebody still needs is
missed in the next step. The model knows nothing of files or sequences; it merges dicts. A failing seed is printed; put
it into SEEDS to keep it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import floodmark as fm
from floodmark.failpoints import FAILPOINTS
from floodmark.sinks.files.units import read_rows, read_units
from floodmark.testing.children import run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place

SEEDS = [1, 2, 3]
STEPS = 80
CHECK_EVERY = 8
BRANCHES_MAX = 3
KEYS = 12
KEYED, PLAIN = "people", "events"
MERGE_POINTS = [point for point, kind in FAILPOINTS.items() if kind == "branch_merge"]

NAMES = ("name", "title", "label")

Row = tuple[int, str]


@dataclass
class State:
    """The rows of both tables, and the shape of each: a number that every rename gives anew, and the column's name."""

    keyed: dict[int, str] = field(default_factory=dict)
    plain: Counter[Row] = field(default_factory=Counter)
    shapes: dict[str, tuple[int, str]] = field(default_factory=lambda: {KEYED: (0, "name"), PLAIN: (0, "name")})

    def copy(self) -> State:
        return State(dict(self.keyed), Counter(self.plain), dict(self.shapes))

    def name(self, table: str) -> str:
        """What the column of values is called."""
        return self.shapes[table][1]


@dataclass(frozen=True)
class Done:
    """What one commit did on a branch, by table: rows added, updated, deleted. `merged`: the branch they came from."""

    version: int
    counts: dict[str, tuple[int, int, int]]
    came: Counter[Row]
    merged: int | None = None


@dataclass
class Branch:
    """A branch in its life. `sent`, `taken`: which version of it its parent has, and it of the parent.

    settled: at which version rows without a key were kept, or replaced as a whole, because somebody chose so: by the
    number of the side that was merged into.
    """

    number: int
    name: str
    parent: Branch | None
    state: State
    head: int
    common: State = field(default_factory=State)
    sent: int = 0
    taken: int = 0
    from_head: bool = True
    log: list[Done] = field(default_factory=list)
    merged_tables: set[str] = field(default_factory=set)
    settled: dict[tuple[int, str], int] = field(default_factory=dict)


@dataclass
class Expected:
    """What a merge must come to."""

    outcome: str
    state: State
    conflicts: set[Any]
    settled: str = ""


class Model:
    def __init__(self, place: Place, seed: int, *, kills: bool) -> None:
        self.random = random.Random(seed)
        self.place = place
        self.kills = kills
        self.made = 0
        self.renames = 0
        self.next_id = 0
        self.main = Branch(0, "main", None, State(), 0)
        self.branches = {"main": self.main}
        self.versions: dict[int, tuple[Branch, State]] = {}
        self.expired: set[int] = set()
        # Who follows a branch's keyed table: the rows it has, and up to which sequence.
        self.replicas: dict[int, tuple[dict[int, str], int]] = {}
        self.merges: Counter[str] = Counter()
        self.shipped = f"{place.path}-shipped"
        self.lake = place.open(create=True)
        self.lake.create_table(KEYED, EVENTS, key=["id"])
        self.lake.create_table(PLAIN, EVENTS)
        for version in (1, 2):
            self.versions[version] = (self.main, State())
        self.main.head = 2
        self.lake.sinks.add("out", "files", tables=[KEYED], path=self.shipped)

    # ── steps ──

    def step(self) -> None:
        kinds = [
            *("upsert", "upsert", "upsert", "delete_keys", "delete_keys", "insert"),
            *("append", "append", "append", "delete_plain", "overwrite", "rollback", "rename"),
            *("create", "create", "delete_branch", "merge", "merge", "merge", "merge", "merge"),
            *("compact", "sweep", "sweep", "reopen", "ship"),
        ]
        getattr(self, f"step_{self.random.choice(kinds)}")()

    def some(self) -> Branch:
        return self.random.choice(list(self.branches.values()))

    def happened(self, branch: Branch, commit: fm.Commit, state: State, merged: int | None = None) -> None:
        came = state.plain - branch.state.plain
        counts = {one.table: (one.rows_added, one.rows_updated, one.rows_deleted) for one in commit.tables}
        branch.state, branch.head = state, commit.version
        branch.log.append(Done(commit.version, counts, came, merged))
        self.versions[commit.version] = (branch, state.copy())

    def wrote(self, branch: Branch, commit: fm.Commit, state: State, before: State) -> None:
        if commit.outcome == "nothing_to_do":
            assert state == before, "something was to be done"
            return
        assert (commit.outcome, commit.branch) == ("committed", branch.name)
        self.happened(branch, commit, state)

    def step_upsert(self) -> None:
        branch = self.some()
        rows = {key: self.random.choice("abc") for key in self.random.sample(range(KEYS), self.random.randint(1, 3))}
        state = branch.state.copy()
        state.keyed.update(rows)
        commit = self.lake.merge(KEYED, _dicts(rows.items(), state.name(KEYED)), branch=branch.name)
        self.wrote(branch, commit, state, branch.state)

    def step_insert(self) -> None:
        branch, key = self.some(), self.random.randrange(KEYS)
        state = branch.state.copy()
        if key in state.keyed:
            with pytest.raises(fm.Invalid):
                self.lake.append(KEYED, _dicts([(key, "x")], state.name(KEYED)), branch=branch.name)
            return
        state.keyed[key] = "a"
        commit = self.lake.append(KEYED, _dicts([(key, "a")], state.name(KEYED)), branch=branch.name)
        self.wrote(branch, commit, state, branch.state)

    def step_delete_keys(self) -> None:
        branch, low = self.some(), self.random.randrange(KEYS)
        high = low + self.random.randint(0, 2)
        state = branch.state.copy()
        state.keyed = {key: value for key, value in state.keyed.items() if not low <= key <= high}
        commit = self.lake.delete(KEYED, f"id >= {low} and id <= {high}", branch=branch.name)
        self.wrote(branch, commit, state, branch.state)

    def new_rows(self) -> Counter[Row]:
        count = self.random.randint(1, 3)
        self.next_id += count
        found = Counter((self.next_id - number, self.random.choice("abc")) for number in range(count))
        return found + Counter(list(found)[:1]) if self.random.random() < 0.3 else found

    def step_append(self) -> None:
        branch, rows = self.some(), self.new_rows()
        state = branch.state.copy()
        state.plain += rows
        commit = self.lake.append(PLAIN, _dicts(rows.elements(), state.name(PLAIN)), branch=branch.name)
        self.wrote(branch, commit, state, branch.state)

    def step_delete_plain(self) -> None:
        branch, value = self.some(), self.random.choice("abc")
        state = branch.state.copy()
        floor = self.random.randint(0, self.next_id)
        state.plain = Counter(
            {row: count for row, count in state.plain.items() if not (row[1] == value and row[0] > floor)}
        )
        where = f"{state.name(PLAIN)} = '{value}' and id > {floor}"
        commit = self.lake.delete(PLAIN, where, branch=branch.name)
        self.wrote(branch, commit, state, branch.state)

    def step_overwrite(self) -> None:
        if self.random.random() < 0.5:
            return
        branch, rows = self.some(), self.new_rows()
        state = branch.state.copy()
        state.plain = Counter(rows)
        commit = self.lake.overwrite(PLAIN, _dicts(rows.elements(), state.name(PLAIN)), branch=branch.name)
        self.wrote(branch, commit, state, branch.state)

    def step_rename(self) -> None:
        """The column of values gets another name on one branch; the others keep theirs until a merge."""
        branch, table = self.some(), self.random.choice([KEYED, PLAIN])
        state, old = branch.state.copy(), branch.state.name(table)
        new = self.random.choice([name for name in NAMES if name != old])
        self.renames += 1
        state.shapes[table] = (self.renames, new)
        commit = self.lake.rename_column(table, old, new, branch=branch.name)
        self.wrote(branch, commit, state, branch.state)

    def step_rollback(self) -> None:
        """One table, or both, return to a version of the branch."""
        branch = self.some()
        mine = [version for version, (owner, _) in self.versions.items() if owner is branch and version > 1]
        live = [version for version in mine if version not in self.expired]
        if not live:
            return
        to, table = self.random.choice(live), self.random.choice([KEYED, PLAIN, None])
        state, then = branch.state.copy(), self.versions[to][1].copy()
        if table != PLAIN:
            state.keyed = then.keyed
        if table != KEYED:
            state.plain = then.plain
        commit = self.lake.rollback(table, to=to, branch=branch.name)
        self.wrote(branch, commit, state, branch.state)

    # ── branches ──

    def step_create(self) -> None:
        if len(self.branches) > BRANCHES_MAX:
            return
        self.made += 1
        name = self.random.choice([name for name in ("dev", "try", "fix") if name not in self.branches])
        parent = self.some()
        from_head = self.random.random() < 0.6
        if from_head:
            base, state = parent.head, parent.state
            self.lake.branches.create(name, source=parent.name)
        else:
            live = [
                version
                for version, (owner, _) in self.versions.items()
                if version > 1 and version not in self.expired and self.branches.get(owner.name) is owner
            ]
            base = self.random.choice(live)
            parent, state = self.versions[base]
            self.lake.branches.create(name, version=base)
        branch = Branch(self.made, name, parent, state.copy(), base, state.copy(), base, base, from_head)
        self.branches[name] = branch

    def step_delete_branch(self) -> None:
        parents = {branch.parent.number for branch in self.branches.values() if branch.parent is not None}
        branch = self.some()
        if branch.number in parents or branch is self.main:
            with pytest.raises(fm.Invalid):
                self.lake.branches.delete(branch.name)
            return
        self.lake.branches.delete(branch.name)
        del self.branches[branch.name]

    def step_merge(self) -> None:
        children = [branch for branch in self.branches.values() if branch.parent is not None]
        if not children:
            return
        child = self.random.choice(children)
        assert child.parent is not None
        source, target = (child, child.parent) if self.random.random() < 0.6 else (child.parent, child)
        prefer = self.random.choice([None, None, "ours", "theirs"])
        expected = expect(source, target, child, prefer)
        mark = next((one.sequence for one in self.lake.heads(target.name) if one.table == PLAIN), None)
        lived = self.kills and self.random.random() < 0.3 and self.killed_merge(source, target, prefer)
        if lived and expected.outcome == "merged":
            (commit,) = self.lake.history(limit=1, branch=target.name)
            self.took(source, target, child, commit, expected, mark)
            expected = Expected("up_to_date", target.state, set())
        version = self.lake.status()["version"]
        try:
            merged = self.lake.branches.merge(source.name, into=target.name, prefer=prefer, on_conflict="return")
        except fm.BelowRetention:
            # Of a parent that is far ahead of where the branch was made from, deletions may not be known any more.
            assert source is child.parent
            assert not child.from_head
            assert self.lake.status()["version"] == version
            self.merges["below_retention"] += 1
            return
        self.merges[merged.outcome] += 1
        assert merged.outcome == expected.outcome, (source.name, target.name, prefer, merged)
        found = {(one.table, None if one.key is None else one.key["id"]) for one in merged.conflicts}
        assert (found, merged.conflicts_total) == (expected.conflicts, len(expected.conflicts))
        if merged.outcome != "merged":
            assert self.lake.status()["version"] == version, "a merge that did nothing made a version"
            return
        assert merged.commit is not None
        self.took(source, target, child, merged.commit, expected, mark)

    def took(
        self, source: Branch, target: Branch, child: Branch, commit: fm.Commit, expected: Expected, mark: int | None
    ) -> None:
        """A branch has got what another one had."""
        child.common = source.state.copy()
        if source is child:
            child.sent = source.head
        else:
            child.taken = source.head
        child.merged_tables.update(one.table for one in commit.tables)
        if expected.settled:
            child.settled[target.number, expected.settled] = commit.version
        came = expected.state.plain - target.state.plain
        self.happened(target, commit, expected.state, source.number)
        if mark is not None:
            self.check_news(target, mark, came)

    def check_news(self, branch: Branch, mark: int, came: Counter[Row]) -> None:
        """Who follows the rows without a key gets those that a merge brought, and none that are not there."""
        rows = self.lake.changes(PLAIN, mark, branch=branch.name).arrow().read_all().to_pylist()
        news = Counter((row["id"], _value(row)) for row in rows)
        assert not came - news, "rows came in below a mark"
        assert not news - branch.state.plain, "rows were told that are not there"

    def killed_merge(self, source: Branch, target: Branch, prefer: str | None) -> bool:
        """Die in the middle of it: it is undone, and can be done again. Whether it lived, and was done."""
        point = self.random.choice([point for point in MERGE_POINTS if not point.endswith(("published", "cleaned"))])
        return not run_killed(merge_in_child, self.place, source.name, target.name, prefer, failpoint=point)

    # ── upkeep ──

    def step_compact(self) -> None:
        done = self.lake.maintain.compact(files_min=2)
        assert {record.outcome for record in done.records} <= {"compacted", "nothing_to_do", "below_threshold"}
        for commit in reversed(self.lake.history(limit=10)):
            if commit.version > self.main.head and commit.kind == "compact":
                self.main.head = commit.version
                self.versions[commit.version] = (self.main, self.main.state.copy())

    def step_sweep(self) -> None:
        gone = self.lake.catalog.expiry.expire(before_ms=2**60)
        heads = {branch.head for branch in self.branches.values()}
        assert heads.isdisjoint(gone)
        self.expired.update(gone)
        done = self.lake.maintain.sweep(grace="0s", deep=self.random.random() < 0.3)
        assert done.outcome in ("swept", "nothing_to_do"), done.as_dict()
        assert all(record.detail.get("unknown_files", 0) == 0 for record in done.records)

    def step_reopen(self) -> None:
        self.lake.close()
        self.lake = self.place.open()

    def step_ship(self) -> None:
        """A sink follows main: what came by merges comes to it as what anybody wrote."""
        assert self.lake.sinks.run("out", until_empty=True).outcome in ("shipped", "nothing_to_do")
        found: dict[int, str] = {}
        for unit in read_units(self.shipped, table=KEYED):
            _apply(found, [row for batch in read_rows(unit) for row in batch.to_pylist()])
        assert found == self.main.state.keyed

    # ── what must hold ──

    def check_rows(self) -> None:
        for branch in self.branches.values():
            self.compare(branch.state, branch=branch.name)
        known = [version for version in self.versions if version not in self.expired]
        version = self.random.choice(known)
        self.compare(self.versions[version][1], version=version)

    def compare(self, state: State, **where: Any) -> None:
        tables = self.lake.catalog.history.tables_at(self.lake.catalog.history.resolve(**where))
        for table, expected in ((KEYED, Counter(state.keyed.items())), (PLAIN, state.plain)):
            if table not in tables:
                assert not expected
                continue
            found = self.lake.read_arrow(table, **where).read_all()
            assert found.column_names == ["id", state.name(table)], (table, where)
            assert Counter((row["id"], _value(row)) for row in found.to_pylist()) == expected, (table, where)

    def check_replicas(self) -> None:
        """Who only asks what is new has what the branch has: nothing came in below a mark, nothing is told falsely."""
        for branch in self.branches.values():
            if KEYED not in {head.table for head in self.lake.heads(branch.name)}:
                continue
            rows, mark = self.replicas.get(branch.number, ({}, None))
            try:
                changes = self.lake.changes(KEYED, mark, branch=branch.name)
            except fm.BelowRetention:
                rows, changes = {}, self.lake.changes(KEYED, branch=branch.name)
            _apply(rows, changes.arrow().read_all().to_pylist())
            assert rows == branch.state.keyed, (branch.name, mark)
            self.replicas[branch.number] = (rows, changes.until)

    def check(self) -> None:
        self.check_replicas()
        check_lake(self.lake.catalog)


def merge_in_child(place: Place, source: str, target: str, prefer: str | None) -> None:
    with place.open() as lake:
        lake.branches.merge(source, into=target, prefer=prefer, on_conflict="return")


# ── the merge of dicts ──


def expect(source: Branch, target: Branch, child: Branch, prefer: str | None) -> Expected:
    since, known = (child.sent, child.taken) if source is child else (child.taken, child.sent)
    state, conflicts = target.state.copy(), set()
    own = own_changes(source, target, since, KEYED)
    plain = expect_plain(source, target, child, since, known)
    takes = {table: takes_shape(source, target, child, table, prefer) for table in (KEYED, PLAIN)}
    if not _moves(source, target, child, since, PLAIN):
        takes[PLAIN] = False
    elif takes[PLAIN] is None:
        plain = "nothing"
    if not own and plain == "nothing" and takes[PLAIN] is False:
        return Expected("up_to_date", state, set())
    for table, moves in ((KEYED, own), (PLAIN, True)):
        if moves and takes[table] is None:
            conflicts.add((table, None))
        elif moves and takes[table]:
            state.shapes[table] = source.state.shapes[table]
    if own and takes[KEYED] is not None:
        for key in range(KEYS):
            ours, theirs, base = (side.keyed.get(key) for side in (target.state, source.state, child.common))
            if theirs in (base, ours):
                continue
            if ours != base and prefer is None:
                conflicts.add((KEYED, key))
            elif ours == base or prefer == "theirs":
                _put(state.keyed, key, theirs)
    settled = "replaced" if plain == "travels" else ""
    if plain == "append":
        # What was replaced by the target's rows since is not there any more.
        last = max(since, child.settled.get((source.number, "replaced"), 0))
        for done in own_changes(source, target, last, PLAIN):
            state.plain += done.came
    elif plain in ("replace", "travels"):
        state.plain = Counter(source.state.plain)
    elif plain == "conflict":
        settled = {None: "", "ours": "kept", "theirs": "replaced"}[prefer]
        if prefer is None:
            conflicts.add((PLAIN, None))
        elif prefer == "theirs":
            state.plain = Counter(source.state.plain)
    return Expected("conflict" if conflicts else "merged", state, conflicts, settled)


def takes_shape(source: Branch, target: Branch, child: Branch, table: str, prefer: str | None) -> bool | None:
    """Whether the target's columns become the source's; None if both changed theirs, and no side is preferred."""
    ours, theirs, common = (side.shapes[table] for side in (target.state, source.state, child.common))
    if ours == theirs or theirs == common:
        return False
    if ours == common:
        return True
    return None if prefer is None else prefer == "theirs"


def _moves(source: Branch, target: Branch, child: Branch, since: int, table: str) -> bool:
    """Whether the source has anything of a table for the target, be it a choice that was made there."""
    kept, replaced = (child.settled.get((source.number, choice), 0) for choice in ("kept", "replaced"))
    return bool(own_changes(source, target, since, table)) or kept > max(since, replaced)


def own_changes(branch: Branch, other: Branch, since: int, table: str) -> list[Done]:
    """What a branch did by itself to a table after a version."""
    return [one for one in branch.log if one.version > since and one.merged != other.number and table in one.counts]


def expect_plain(source: Branch, target: Branch, child: Branch, since: int, known: int) -> str:
    """Rows without a key cannot be told apart: appends go together, all else only into a table that stood still."""
    kept, replaced = (child.settled.get((source.number, choice), 0) for choice in ("kept", "replaced"))
    chosen = [child.settled.get((target.number, choice), 0) for choice in ("kept", "replaced")]
    theirs = own_changes(source, target, max(since, replaced), PLAIN)
    ours = own_changes(target, source, max(known, *chosen), PLAIN)
    if kept > max(since, replaced):
        # The source is what was chosen against the target, which does not know it yet.
        return "conflict" if ours else "travels"
    if not any(any(one.counts[PLAIN]) for one in theirs):
        return "nothing"
    if _only_added(theirs):
        return "append" if _only_added(ours) else "conflict"
    still = PLAIN not in child.merged_tables and not own_changes(target, source, known, PLAIN)
    return "replace" if still else "conflict"


def _only_added(changes: list[Done]) -> bool:
    return all(one.counts[PLAIN][1:] == (0, 0) for one in changes)


def _put(rows: dict[int, str], key: int, value: str | None) -> None:
    if value is None:
        rows.pop(key, None)
    else:
        rows[key] = value


def _apply(rows: dict[int, str], changes: list[dict[str, Any]]) -> None:
    for row in changes:
        _put(rows, row["id"], None if row["_change"] == "delete" else _value(row))


def _dicts(rows: Any, column: str) -> list[dict[str, Any]]:
    return [{"id": number, column: value} for number, value in rows]


def _value(row: dict[str, Any]) -> str:
    """What a row has, whatever the column was called when it was read."""
    (name,) = set(row) & set(NAMES)
    return str(row[name])


def run_model(place: Place, seed: int, steps: int, *, kills: bool = False) -> Counter[str]:
    model = Model(place, seed, kills=kills)
    try:
        for step in range(steps):
            try:
                model.step()
                model.check_rows()
                if step % CHECK_EVERY == CHECK_EVERY - 1 or step == steps - 1:
                    model.check()
            except BaseException:
                print(f"seed {seed}, step {step}")
                raise
    finally:
        model.lake.close()
    return model.merges


@pytest.mark.parametrize("seed", SEEDS)
def test_random_work_on_branches_matches_the_dicts(new_place: Callable[[str], Place], seed: int) -> None:
    merges = run_model(new_place("sqlite"), seed, STEPS)
    assert merges["merged"] > 3, "hardly anything was merged"


@pytest.mark.soak
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_soak(new_place: Callable[[str], Place], database: str) -> None:
    seed = int(os.environ.get("FLOODMARK_SOAK_SEED", "0")) or random.SystemRandom().randint(1, 10**9)
    for number in range(10):
        run_model(new_place(database), seed + number, 600, kills=True)
