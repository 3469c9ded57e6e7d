"""Random queries over three small tables, for tests that run them in two ways: the same seed gives the same queries.

They aim at what is easily got wrong: the optional side of outer joins, nulls in NOT IN, names of an outer query,
aliases and WITH names that are names of tables, casts that fail, and LIMIT, DISTINCT, groups and windows between a
condition and the table. Every query has one answer, whatever the order in which its rows are read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

TABLES = {
    "t": "id int, k int, s string, day date, ok boolean, ts timestamp",
    "u": "id int, k int, s string, day date, v long, ntz timestamp_ntz",
    "w": "k int, day date, n int, s string, st struct<k:int,day:date>",
}
DAYS = ("2026-01-01", "2026-01-02", "2026-01-03", "2026-02-01")
LITERALS = {
    "int": (*("0", "1", "2", "3") * 4, "-1", "2L", "cast(1 as bigint)", "1.5", "'1'", "null", "(2)", "1 + 1"),
    "string": (*("'a'", "'b'", "'ab'") * 4, "''", "'1'", "1", "null", "'2026-01-01'", "upper('a')", "'a' || 'b'"),
    "date": (
        *(f"{form}'{day}'" for day in DAYS[:3] for form in ("", "", "", "date ", "date ", "DATE")),
        *("cast('2026-01-02' as date)", "date('2026-01-02')", "'2026-01-02'::date", "timestamp '2026-01-02 00:00:00'"),
        *("null", "to_date('2026-01-01')", "date '2026-01-01' + interval 1 day", "'2026-01-02 10:00:00'", "'2026-1-2'"),
    ),
    "timestamp": (
        *(f"{form}'{day}'" for day in DAYS[:3] for form in ("", "", "timestamp ", "date ", "timestamp_ntz ")),
        *("'2026-01-02 12:00:00'", "timestamp '2026-01-02 12:00:00'", "timestamp '2026-01-02 12:00:00+05:00'", "null"),
        *("cast('2026-01-03' as timestamp)", "timestamp_ltz '2026-01-02 12:00:00'"),
    ),
    "boolean": ("true", "false", "null", "1 = 1"),
}
SIGNS = ("=", "=", "=", "==", "<", "<=", ">", ">=", "!=", "<>", "<=>")
JOINS = (
    *("join", "inner join", "left join", "left outer join", "right join", "right outer join", "full join"),
    *("full outer join", "cross join", "left semi join", "semi join", "left anti join", "anti join", "left join"),
)

Columns = list[tuple[str, str]]


@dataclass
class Scope:
    """The relations that an expression sees, with their columns; `outer` are those of the queries around it.

    `joined` are the names of USING, which are written without an alias.
    """

    relations: list[tuple[str, Columns]] = field(default_factory=list)
    outer: list[tuple[str, Columns]] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)


class Queries:
    def __init__(self, seed: object) -> None:
        self._chance = random.Random(str(seed))
        self._number = 0

    def one(self) -> str:
        text, columns = self._query([], {}, self._chance.choice([1, 1, 2, 2, 3]))
        kinds = {kind for _, kind in columns}
        if self._is(0.6) or len({name for name, _ in columns}) < len(columns) or not kinds & set(LITERALS):
            return text
        return f"select * from ({text}) q where {self._condition(Scope([('q', columns)]), {}, 0, 1)}"

    # ── queries ──

    def _query(self, outer: list[tuple[str, Columns]], names: dict[str, Columns], depth: int) -> tuple[str, Columns]:
        names = dict(names)
        start = ""
        if depth > 1 and self._is(0.3):
            parts = []
            for _ in range(self._chance.choice([1, 1, 2])):
                name = self._chance.choice(["t", "u", "c", "d", "C"])
                if name.lower() in {part.split(" ")[0].lower() for part in parts}:
                    continue
                text, columns = self._query([], names, depth - 1)
                if len({one[0] for one in columns}) < len(columns):
                    continue
                names[name.lower()] = columns
                parts.append(f"{name} as ({text})")
            start = f"with {', '.join(parts)} " if parts else ""
        if self._is(0.2):
            text, columns = self._operation(outer, names, depth - 1)
        else:
            text, columns = self._select(outer, names, depth - 1)
        if self._is(0.1) and columns:
            order = ", ".join(str(place + 1) for place in range(len(columns)))
            text += f" order by {order} limit {self._chance.choice([1, 2, 5])}"
        return start + text, columns

    def _operation(
        self, outer: list[tuple[str, Columns]], names: dict[str, Columns], depth: int
    ) -> tuple[str, Columns]:
        kinds = [self._chance.choice(["int", "string", "date"]) for _ in range(self._chance.choice([1, 2]))]
        sides = [self._select(outer, names, depth, kinds) for _ in range(self._chance.choice([2, 2, 3]))]
        word = ["union all", "union all", "union", "except", "intersect", "minus", "union distinct", "except all"]
        text = sides[0][0]
        for side in sides[1:]:
            text += f" {self._chance.choice(word)} {side[0] if self._is(0.7) else f'({side[0]})'}"
        return text, sides[0][1]

    def _select(
        self,
        outer: list[tuple[str, Columns]],
        names: dict[str, Columns],
        depth: int,
        kinds: Sequence[str] | None = None,
    ) -> tuple[str, Columns]:
        scope = Scope(outer=outer)
        source = self._from(scope, names, depth)
        where = f" where {self._condition(scope, names, depth)}" if self._is(0.75) else ""
        if kinds is not None:
            columns = [self._typed(scope, kind) for kind in kinds]
            named = [(f"{text} as {self._name()}" if self._is(0.4) else text) for text in columns]
            shown = [self._shown(one) for one in named]
            return f"select {', '.join(named)} from {source}{where}", list(zip(shown, kinds, strict=True))
        chance = self._chance.random()
        if chance < 0.25 and self._plain(scope):
            return f"select * from {source}{where}", self._starred(scope)
        if chance < 0.4:
            return self._grouped(scope, names, depth, source, where)
        items, columns = self._items(scope, names, depth)
        distinct = "distinct " if self._is(0.1) else ""
        hint = "/*+ broadcast(t) */ " if self._is(0.03) else ""
        return f"select {hint}{distinct}{', '.join(items)} from {source}{where}", columns

    def _items(self, scope: Scope, names: dict[str, Columns], depth: int) -> tuple[list[str], Columns]:
        items: list[str] = []
        columns: Columns = []
        for _ in range(self._chance.choice([1, 2, 2, 3])):
            chance = self._chance.random()
            text, kind = self._column(scope)
            if chance < 0.45:
                items.append(text)
                columns.append((self._shown(text), kind))
                continue
            name = self._name()
            if chance < 0.6:
                items.append(f"{text} as {name}")
            elif chance < 0.7:
                items.append(f"cast({text} as date) {name}" if kind in ("timestamp", "date") else f"{text} {name}")
                kind = "date" if kind == "timestamp" else kind
            elif chance < 0.8:
                other, _ = self._column(scope)
                function = self._chance.choice(["count({})", "row_number()", "min({})"])
                order = ", ".join(one for one, _ in self._all(scope))
                items.append(f"{function.format(other)} over (partition by {text} order by {order}) as {name}")
                kind = "other"
            elif chance < 0.87 and depth > 0:
                inner = self._scalar(scope, names, depth - 1, kind)
                items.append(f"({inner}) as {name}")
            else:
                items.append(f"coalesce({text}, null) as {name}")
            columns.append((name, kind))
        return items, columns

    def _grouped(
        self, scope: Scope, names: dict[str, Columns], depth: int, source: str, where: str
    ) -> tuple[str, Columns]:
        text, kind = self._column(scope)
        other, other_kind = self._column(scope)
        name = self._name()
        aggregate = self._chance.choice(["count(*)", "max({})", "min({})", "count(distinct {})"]).format(other)
        having = f" having {self._test(text, kind)}" if self._is(0.3) else ""
        columns = [(self._shown(text), kind), (name, other_kind if aggregate.startswith("m") else "int")]
        if self._is(0.1):
            grouping = self._chance.choice([f"rollup({text})", f"{text} with rollup", f"grouping sets (({text}), ())"])
            return f"select {text}, {aggregate} as {name} from {source}{where} group by {grouping}", columns
        if self._is(0.2):
            return f"select {aggregate} as {name} from {source}{where}", columns[1:]
        by = self._chance.choice([text, text, "1", "all"])
        return f"select {text}, {aggregate} as {name} from {source}{where} group by {by}{having}", columns

    def _scalar(self, scope: Scope, names: dict[str, Columns], depth: int, kind: str) -> str:
        inner = Scope(outer=[*scope.relations])
        source = self._from(inner, names, 0)
        where = f" where {self._condition(inner, names, depth, 1)}" if self._is(0.8) else ""
        return f"select max({self._typed(inner, kind, outer=False)}) from {source}{where}"

    # ── relations ──

    def _from(self, scope: Scope, names: dict[str, Columns], depth: int) -> str:
        text = self._relation(scope, names, depth)
        for _ in range(self._chance.choice([0, 0, 1, 1, 1, 2])):
            text += self._joined(scope, names, depth)
        if self._is(0.05) and self._plain(scope):
            alias = f"e{self._next()}"
            text += f" lateral view explode(array(1, 2)) {alias} as x{alias}"
            scope.relations.append((alias, [(f"x{alias}", "int")]))
        return text

    def _joined(self, scope: Scope, names: dict[str, Columns], depth: int) -> str:
        if self._is(0.12):
            return f", {self._relation(scope, names, depth)}"
        join = self._chance.choice(JOINS)
        before = len(scope.relations)
        if self._is(0.1) and depth > 0:
            right = f"({self._relation(scope, names, depth)}{self._joined(scope, names, depth - 1)})"
        else:
            right = self._relation(scope, names, depth)
        left, new = scope.relations[:before], scope.relations[before:]
        both = {name for _, columns in left for name, _ in columns} & {
            name for _, columns in new for name, _ in columns
        }
        once = [name for name in sorted(both) if self._once(left, name) and self._once(new, name)]
        chance = self._chance.random()
        on = ""
        if chance < 0.2 and once:
            name = self._chance.choice(once)
            scope.joined.add(name)
            on = f" using ({name})"
        elif join != "cross join" and chance < 0.95:
            on = (
                f" on {self._condition(Scope(scope.relations, scope.outer if self._is(0.1) else []), names, depth - 1)}"
            )
            pairs = [
                f"{a}.{x} = {b}.{y}"
                for a, xs in left
                for x, i in xs
                for b, ys in new
                for y, j in ys
                if i == j != "struct"
            ]
            if pairs and self._is(0.8):
                on = f" on {self._chance.choice(pairs)}" + (f" and {on[4:]}" if self._is(0.6) else "")
        elif "outer" in join or "semi" in join or "anti" in join or "full" in join:
            on = " on true"
        if "semi" in join or "anti" in join:
            del scope.relations[before:]
        return f" {join} {right}{on}"

    def _relation(self, scope: Scope, names: dict[str, Columns], depth: int) -> str:
        known = {alias for alias, _ in scope.relations}
        chance = self._chance.random()
        if chance < 0.25 and depth > 0:
            text, columns = self._query([], names, depth - 1)
            if len({one[0] for one in columns}) == len(columns):
                alias = self._alias(known)
                scope.relations.append((alias, columns))
                return f"({text}) {alias}"
        if self._is(0.04):
            alias = self._alias(known)
            scope.relations.append((alias, [("k", "int"), ("s", "string")]))
            return f"(values (1, 'a'), (2, null)) {alias}(k, s)"
        choices = [*TABLES, *names, *names]
        table = self._chance.choice(choices)
        columns = names.get(table) or columns_of(table)
        written = self._chance.choice([table, table, table.upper(), f"`{table}`"])
        if table in known or self._is(0.5):
            alias = self._alias(known)
            scope.relations.append((alias, columns))
            return f"{written}{self._chance.choice([' ', ' as '])}{alias}"
        scope.relations.append((table, columns))
        return written

    def _alias(self, known: set[str]) -> str:
        for alias in self._chance.sample(["a", "b", "t", "u", "k", "c", "st", "day"], 8):
            if alias not in known:
                return alias
        return f"a{self._next()}"

    # ── expressions ──

    def _condition(self, scope: Scope, names: dict[str, Columns], depth: int, size: int = 2) -> str:
        chance = self._chance.random()
        if size > 0 and chance < 0.45:
            word = self._chance.choice([" and ", " and ", " or ", " AND ", " and "])
            parts = [self._condition(scope, names, depth, size - 1) for _ in range(self._chance.choice([2, 2, 3]))]
            text = word.join(parts)
            return f"({text})" if self._is(0.6) else text
        if size > 0 and chance < 0.51:
            inner = self._condition(scope, names, depth, size - 1)
            return f"not {inner}" if self._is(0.4) else f"not ({inner})"
        if chance < 0.58 and depth > 0:
            return self._subquery(scope, names, depth - 1)
        if chance < 0.6:
            return self._chance.choice(["rand() < 2", "true", "1 = 1", "coalesce(null, true)", "null is null"])
        if chance < 0.63:
            text, kind = self._column(scope)
            others = [one for one, other in self._all(scope, outer=True) if other == kind]
            return f"{text} {self._chance.choice(SIGNS)} {self._chance.choice(others or [text])}"
        text, kind = self._column(scope, outer=True)
        if kind == "boolean" and self._is(0.4):
            return self._chance.choice([text, f"not {text}", f"{text} is true", f"{text} is not false"])
        return self._test(text, kind)

    def _subquery(self, scope: Scope, names: dict[str, Columns], depth: int) -> str:
        inner = Scope(outer=[*scope.relations])
        chance = self._chance.random()
        if chance < 0.4:
            source = self._from(inner, names, 0)
            word = self._chance.choice(["exists", "not exists"])
            return f"{word} (select 1 from {source} where {self._condition(inner, names, depth, 1)})"
        text, kind = self._column(scope)
        if chance < 0.8:
            source = self._from(inner, names, 0)
            where = f" where {self._condition(inner, names, depth, 1)}" if self._is(0.7) else ""
            word = self._chance.choice(["in", "not in"])
            return f"{text} {word} (select {self._typed(inner, kind, outer=False)} from {source}{where})"
        return f"{text} {self._chance.choice(SIGNS)} ({self._scalar(scope, names, depth, kind)})"

    def _test(self, text: str, kind: str) -> str:
        pick = self._chance.choice
        if kind not in LITERALS:
            return f"{text} is {pick(['', 'not '])}null"
        literals = LITERALS[kind]
        one, two = pick(literals), pick(literals)
        forms = [
            *(f"{text} {pick(SIGNS)} {one}" for _ in range(4)),
            f"{one} {pick(SIGNS)} {text}",
            *(f"{text} in ({one}, {two})", f"{text} not in ({one}, {two})", f"{text} in ({one})"),
            *(f"{text} between {one} and {two}", f"{text} not between {one} and {two}"),
            *(f"{text} is null", f"{text} is null", f"{text} is not null", f"{text} is distinct from {one}"),
            *(f"{text} is null or {text} = {one}", f"not ({text} = {one})", f"{text} is null"),
            *(f"{text} is not distinct from {one}", f"({text}) = {one}", f"{text} = {one} is null"),
            f"case when {text} = {one} then true else {text} = {two} end",
        ]
        if kind == "string":
            forms += [
                f"{text} {word} {pattern}" for word in ("like", "not like") for pattern in ("'a%'", "'%b'", "'_'")
            ]
            forms += [f"{text} like 'a%' escape '/'", f"{text} like any ('a%', 'b')", f"{text} rlike 'a'"]
            forms += [f"cast({text} as int) = 1", f"try_cast({text} as int) > 0"]
        if kind in ("timestamp", "date"):
            day = pick(LITERALS["date"])
            forms += [
                f"{word} {pick(SIGNS)} {day}" for word in (f"cast({text} as date)", f"date({text})", f"{text}::date")
            ]
            forms += [f"cast({text} as date) in ('2026-01-01', {day})", f"cast({text} as date) between {day} and {day}"]
        return pick(forms)

    # ── names ──

    def _column(self, scope: Scope, outer: bool = False) -> tuple[str, str]:
        return self._chance.choice(self._all(scope, outer=outer and self._is(0.25)))

    def _all(self, scope: Scope, outer: bool = False) -> list[tuple[str, str]]:
        """The columns in scope as they may be written, with their types."""
        found = []
        for relations, inner in ((scope.relations, []), (scope.outer if outer else [], scope.relations)):
            for alias, columns in relations:
                hidden = any(alias == other for other, _ in inner)
                for name, kind in columns:
                    if kind == "struct":
                        continue
                    unique = sum(name == other for _, others in [*scope.relations, *relations] for other, _ in others)
                    joined = relations is scope.relations and name in scope.joined
                    bare = (joined or unique == (2 if relations is scope.relations else 1)) and self._is(0.5)
                    if bare or not hidden:
                        written = name if bare else f"{alias}.{name}"
                        found.append(
                            (
                                self._chance.choice(
                                    [written] * 6 + [written.upper(), f"`{name}`" if bare else written]
                                ),
                                kind,
                            )
                        )
        return found or [("1", "int")]

    def _typed(self, scope: Scope, kind: str, outer: bool = True) -> str:
        found = [text for text, other in self._all(scope) if other == kind]
        if not found or self._is(0.1):
            return self._chance.choice({"int": ["1", "cast(null as int)"], "string": ["'a'"]}.get(kind, ["null"]))
        return self._chance.choice(found)

    def _shown(self, text: str) -> str:
        """The name that a selected column gets."""
        return text.rsplit(" ", 1)[-1].rsplit(".", 1)[-1].strip("`").lower()

    def _name(self) -> str:
        return self._chance.choice(["k", "id", "s", "day", "x", "y", "t", "n"])

    def _starred(self, scope: Scope) -> Columns:
        """What a star gives: a name of USING once."""
        columns = [one for _, columns in scope.relations for one in columns]
        first = dict(reversed([(name, at) for at, (name, _) in enumerate(columns)]))
        return [one for at, one in enumerate(columns) if one[0] not in scope.joined or first[one[0]] == at]

    def _plain(self, scope: Scope) -> bool:
        return len(scope.relations) > 0

    def _once(self, relations: list[tuple[str, Columns]], name: str) -> bool:
        return sum(name == other for _, columns in relations for other, _ in columns) == 1

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _is(self, share: float) -> bool:
        return self._chance.random() < share


def columns_of(table: str) -> Columns:
    parts = TABLES[table].split(", ")
    return [
        (name, {"long": "int", "timestamp_ntz": "timestamp"}.get(kind, kind.partition("<")[0]))
        for name, kind in (part.split(" ", 1) for part in parts)
    ]
