"""What a query needs of each table of a lake: a condition that is true for every row that can matter to its answer.

Spark runs the query as written; the condition only leaves out files without such a row. So a condition that is too wide
costs time, and one that is too narrow costs an answer: everything here is an allow-list, and fails closed. A query with
a character or word whose meaning is not certain proves nothing at all (`_clear_text`), nor does a tree of sqlglot with
an unknown clause or argument (`_Unsure`). A predicate of unknown form proves nothing by itself (`_translate`).

Each SELECT uses its WHERE and its ON for the relations of its own FROM: rows that cannot satisfy them cannot change its
result, however that result is used. A row of the optional side of an outer join hides a row of nulls, so there only a
condition that is never true for nulls counts. What is known of a derived table or a WITH name moves into its query if
that query passes rows on one by one. A table that is read several times needs what any of its reads needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import partial
from itertools import chain

import sqlglot
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BooleanType,
    DateType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
)
from sqlglot import exp
from sqlglot.errors import SqlglotError

from floodmark.errors import Invalid
from floodmark.rows.schema import user_fields
from floodmark.rows.sql.condition import NO_COLUMN
from floodmark.rows.sql.where import Where, mentioned

# Longer queries or conditions, and queries with more reads of WITH names, are not worth the time. Of longer lists of
# values only the bounds are used: statistics are not compared with each of so many.
_CHARACTERS_MAX = 200_000
_WHERE_CHARACTERS_MAX = 10_000
_VALUES_MAX = 200
_VISITS_MAX = 500


@dataclass(frozen=True)
class Need:
    """What a query needs of one table: rows that match `where`, and `columns`; None stands for all of them."""

    where: Where | None = None
    columns: tuple[str, ...] | None = None


def needs(query: str, tables: Mapping[str, Schema]) -> dict[str, Need]:
    """The needs of a query by table. A table that is missing in the answer is needed as it is."""
    text = _clear_text(query.rstrip().rstrip(";")) if len(query) <= _CHARACTERS_MAX else None
    if text is None:
        return {}
    try:
        reads = _Reads(tables)
        wheres, whole = reads.of(sqlglot.parse_one(text, read="spark"))
    except (SqlglotError, _Unsure, RecursionError):
        return {}
    found = {}
    for table, where in wheres.items():
        # A column without a star above it is read by its name, so the name stands in the query.
        columns = None if table in whole else tuple(column.name for column in mentioned(text, tables[table]))
        need = Need(_parsed(where, tables[table]), columns)
        if need != Need():
            found[table] = need
    return found


def _parsed(where: str | None, schema: Schema) -> Where | None:
    if where is None or len(where) > _WHERE_CHARACTERS_MAX:
        return None
    with suppress(Invalid):  # a condition that is not understood leaves out nothing
        return Where.parse(where, schema)
    return None


class _Unsure(Exception):
    """The tree has something that may mean anything."""


# ── is the text clear? ──

_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t\n]|\r\n)+ | --[^\r\n]* | /\*(?P<note>(?:(?!/\*|\*/).)*)\*/)
    | (?P<text>'[^'\x00-\x08\x0b\x0c\x0e-\x1f]*'(?!'))
    | (?P<quoted>`[^`\x00-\x1f]+`(?!`))
    | (?P<number>[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?(?:bd|[lsydf])?)(?![A-Za-z0-9_.])
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<sign><=>|!=|::|->|\|\||\*(?!/)|/(?!\*)|[-+%&|^~<>=(),.\[\]])
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
# Words of clauses that are left to Spark, in whatever role.
_DOUBTFUL = frozenset(
    {"table", "identifier", "pivot", "unpivot", "tablesample", "stream", "recursive", "insert", "match_recognize"}
)
_SET_OPERATIONS = frozenset({"union", "intersect", "except", "minus"})
# For sqlglot these are casts. For Spark they are functions, and a session may have its own of that name.
_CALLS = frozenset({"date", "timestamp"})


@dataclass
class _Level:
    """What began in one pair of parentheses."""

    selects: bool = False
    names: bool = False


def _clear_text(query: str) -> str | None:
    """The query for sqlglot, without comments; None if it does not certainly mean the same to Spark.

    Not certain are double quotes (text or names, by a setting), escapes, variables, parameters, comments in comments,
    letters beyond ASCII outside of quotes, pipes, and queries that begin with FROM.
    """
    position, before, levels, parts, last = 0, ["", ""], [_Level()], list[str](), 0
    if "\\" in query or "${" in query:
        return None
    while position < len(query):
        found = _TOKEN.match(query, position)
        if found is None:
            return None
        position = found.end()
        kind, note = found.lastgroup or "", found["note"]
        if kind in ("blank", "note"):
            if note is not None and note.startswith("+") and re.search("--|['`]", note):
                return None  # a hint: Spark reads tokens in it
            parts.append("\n")
            continue
        token = found[0].lower() if kind in ("word", "sign") else kind
        if token in _DOUBTFUL or not _fits(token, before, levels):
            return None
        if token == "(" and before[-1] in _CALLS:
            parts[last] += "_"
        last = len(parts)
        parts.append(found[0])
        before = [before[-1], token]
    return "".join(parts) if len(levels) == 1 else None


def _fits(token: str, before: Sequence[str], levels: list[_Level]) -> bool:
    """Follow the parentheses. False where Spark and sqlglot may differ, and for a query that begins with FROM."""
    level = levels[-1]
    if (before[-1], token) in (("text", "text"), (".", "number"), ("|", ">")):
        return False  # what two texts in a row are depends on a setting
    match token:
        case "(":
            levels.append(_Level())
        case ")":
            levels.pop()
            return bool(levels)
        case "select":
            level.selects = True
        case "with":
            level.names = True
        case "union" | "intersect" | "except" | "minus":
            level.selects = False
        case "from":
            behind = before[-1] if before[-1] not in ("all", "distinct") else before[-2]
            return behind not in ("", "(", *_SET_OPERATIONS) and (level.selects or not level.names)
    return True


# ── what a row must be like ──


@dataclass(frozen=True)
class _Column:
    """An output of one relation of a FROM, by both places; `as_day` is its value cast to a date."""

    relation: int
    place: int
    as_day: bool = False


@dataclass(frozen=True)
class _Value:
    """A literal: its kind (number, text, boolean, date, timestamp, timestamp_ntz) and its text."""

    kind: str
    text: str


@dataclass(frozen=True)
class _Test:
    """A column compared with literals."""

    column: _Column
    sign: str
    values: tuple[_Value, ...] = ()


@dataclass(frozen=True)
class _Every:
    parts: tuple[_Condition, ...]


@dataclass(frozen=True)
class _Some:
    parts: tuple[_Condition, ...]


_Condition = _Test | _Every | _Some


def _every(parts: Sequence[_Condition | None]) -> _Condition | None:
    """A part that is not known is left out: the rest still follows."""
    whole = (part.parts if isinstance(part, _Every) else [part] for part in parts)
    known = tuple(dict.fromkeys(part for part in chain.from_iterable(whole) if part is not None))
    return known[0] if len(known) == 1 else _Every(known) if known else None


def _some(parts: Sequence[_Condition | None]) -> _Condition | None:
    """If one part is not known, nothing follows. Values of one column become one list."""
    if not parts or any(part is None for part in parts):
        return None
    others: list[_Condition] = []
    values: dict[_Column, list[_Value]] = {}
    for part in parts:
        if isinstance(part, _Test) and part.sign in ("=", "in"):
            values.setdefault(part.column, []).extend(part.values)
        elif part is not None and part not in others:
            others.append(part)
    for column, listed in values.items():
        known = tuple(dict.fromkeys(listed))
        others.append(_Test(column, "=" if len(known) == 1 else "in", known))
    return others[0] if len(others) == 1 else _Some(tuple(others))


def _moved(condition: _Condition, move: Callable[[_Test], _Condition | None]) -> _Condition | None:
    """The condition with each test replaced; a test without a replacement is not known."""
    match condition:
        case _Test():
            return move(condition)
        case _Every():
            return _every([_moved(part, move) for part in condition.parts])
    return _some([_moved(part, move) for part in condition.parts])


def _on_relation(condition: _Condition, relation: int) -> _Condition | None:
    return _moved(condition, lambda test: test if test.column.relation == relation else None)


def _rejects_nulls(condition: _Condition) -> bool:
    """Whether it is never true for a row whose columns are all null."""
    match condition:
        case _Test():
            return condition.sign != "is null"
        case _Every():
            return any(_rejects_nulls(part) for part in condition.parts)
    return all(_rejects_nulls(part) for part in condition.parts)


# ── predicates ──

_TYPED = {
    exp.DType.DATE: "date",
    exp.DType.TIMESTAMPTZ: "timestamp",
    exp.DType.TIMESTAMPLTZ: "timestamp",
    exp.DType.TIMESTAMPNTZ: "timestamp_ntz",
}
_SIGNS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "!=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
_NEGATED = {
    "=": "!=",
    "!=": "=",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
    "in": "not in",
    "like": "not like",
    "is null": "is not null",
}
_TURNED = {"=": "=", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_DIGITS = re.compile(r"[0-9]{1,38}")
_PLAIN_TEXT = re.compile(r"[^'\\\x00-\x1f\x7f\ud800-\udfff]*")

Resolve = Callable[[exp.Column], _Column | None]


def _only(node: exp.Expr, *names: str) -> bool:
    """Whether the node has no arguments but these: sqlglot notes what it has read in arguments."""
    return all(name in names or not value for name, value in node.args.items())


def _plain(node: exp.Expr) -> exp.Expr:
    """The node without parentheses around it."""
    while type(node) is exp.Paren and _only(node, "this"):
        node = node.this
    return node


def _translate(node: exp.Expr, resolve: Resolve, positive: bool = True) -> _Condition | None:
    """What follows for a row if the expression is true, or if it is false; None if nothing is certain.

    In SQL's logic, a NOT moves inwards: NOT of AND is OR, and NOT of an unknown comparison is unknown as its opposite.
    """
    node = _plain(node)
    kind = type(node)
    if kind is exp.Not and _only(node, "this"):
        return _translate(node.this, resolve, not positive)
    if kind in (exp.And, exp.Or) and _only(node, "this", "expression"):
        parts = [_translate(part, resolve, positive) for part in _chained(node)]
        return _every(parts) if (kind is exp.And) == positive else _some(parts)
    if kind is exp.Between and _only(node, "this", "low", "high"):
        bounds = [
            _test(node.this, sign, [node.args[name]], resolve, positive)
            for sign, name in ((">=", "low"), ("<=", "high"))
        ]
        return _every(bounds) if positive else _some(bounds)
    return _predicate(node, resolve, positive)


def _chained(node: exp.Expr) -> Iterator[exp.Expr]:
    """The operands of a chain of the same operator, which may be long."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if type(part) is type(node) and _only(part, "this", "expression"):
            waiting += [part.args["expression"], part.this]
        else:
            yield part


def _predicate(node: exp.Expr, resolve: Resolve, positive: bool) -> _Condition | None:
    kind = type(node)
    if kind in _SIGNS and _only(node, "this", "expression"):
        sign = _SIGNS[kind]
        found = _test(node.this, sign, [node.args["expression"]], resolve, positive)
        return found or _test(node.args["expression"], _TURNED[sign], [node.this], resolve, positive)
    if kind is exp.NullSafeEQ and positive and _only(node, "this", "expression"):
        found = _test(node.this, "=", [node.args["expression"]], resolve)
        return found or _test(node.args["expression"], "=", [node.this], resolve)
    if kind is exp.In and node.expressions and _only(node, "this", "expressions"):
        return _test(node.this, "in", node.expressions, resolve, positive)
    if kind is exp.Like and _only(node, "this", "expression", "negate"):
        like = positive != bool(node.args.get("negate"))
        return _test(node.this, "like", [node.args["expression"]], resolve, like)
    if kind is exp.Is and _only(node, "this", "expression"):
        if type(node.args["expression"]) is exp.Null:
            return _test(node.this, "is null", [], resolve, positive)
        if type(node.args["expression"]) is exp.Boolean and positive:
            return _test(node.this, "=", [node.args["expression"]], resolve)
    if kind is exp.Column:
        return _test(node, "=", [exp.Boolean(this=True)], resolve, positive)
    return None


def _test(
    operand: exp.Expr, sign: str, literals: Sequence[exp.Expr], resolve: Resolve, positive: bool = True
) -> _Test | None:
    column = _operand(operand, resolve)
    values = [_literal(literal) for literal in literals]
    known = tuple(value for value in values if value is not None)
    if column is None or len(known) < len(values):
        return None
    return _Test(column, sign if positive else _NEGATED[sign], known)


def _operand(node: exp.Expr, resolve: Resolve) -> _Column | None:
    """A column, or one that is cast to a date."""
    node = _plain(node)
    if type(node) is exp.Column:
        return resolve(node)
    if type(node) in (exp.Cast, exp.TryCast) and _only(node, "this", "to") and _target(node) is exp.DType.DATE:
        inner = _plain(node.this)
        column = resolve(inner) if type(inner) is exp.Column else None
        return None if column is None else replace(column, as_day=True)
    return None


def _target(cast: exp.Expr) -> exp.DType | None:
    """The plain type that something is cast to."""
    to = cast.args["to"]
    return to.this if type(to) is exp.DataType and _only(to, "this", "nested") and not to.args.get("nested") else None


def _literal(node: exp.Expr) -> _Value | None:
    node = _plain(node)
    kind = type(node)
    if kind is exp.Boolean:
        return _Value("boolean", "true" if node.this else "false")
    if kind is exp.Neg and _only(node, "this"):
        number = _literal(node.this)
        known = number is not None and number.kind == "number" and not number.text.startswith("-")
        return _Value("number", f"-{number.text}") if number is not None and known else None
    if kind is exp.Literal:
        if node.args.get("is_string"):
            return _Value("text", node.this) if _PLAIN_TEXT.fullmatch(node.this) else None
        return _Value("number", node.this) if _DIGITS.fullmatch(node.this) else None
    if kind in (exp.Cast, exp.TryCast) and _only(node, "this", "to"):
        target, inner = _target(node), _literal(node.this)
        typed = None if target is None else _TYPED.get(target)
        if typed is not None and inner is not None and inner.kind == "text":
            return _Value(typed, inner.text)
    return None


# ── the relations of a SELECT ──


@dataclass(frozen=True)
class _Output:
    """A column of a relation: its name in lower case, and its type if a condition on it can reach a table."""

    name: str | None
    kind: IcebergType | None = None


@dataclass(frozen=True)
class _Derived:
    """A query that is read as a relation, and the WITH names that it sees; `renamed` if its columns get other names."""

    query: exp.Expr
    names: Mapping[str, _Derived]
    renamed: bool = False


_Names = Mapping[str, _Derived]


@dataclass
class _Relation:
    """One relation of a FROM: a table of the lake, a query, or neither: a function, values, a view of the session.

    `outputs` is None if they are not known. `optional`: a row of nulls takes its place where nothing matches. `hidden`:
    only the ON of its join sees it.
    """

    source: str | _Derived | None
    alias: str | None
    outputs: Sequence[_Output] | None
    conditions: list[_Condition] = field(default_factory=list)
    optional: bool = False
    hidden: bool = False


@dataclass
class _From:
    """The relations of a FROM in their order.

    `joined` are the names of USING. Without an alias such a name is the column of one side, and `covered` has that of
    the other; `unsure` are names where it may be of both, as in a full join. `same`: pairs that an inner join has made
    equal.
    """

    relations: list[_Relation] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)
    covered: set[_Column] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)
    same: list[tuple[_Column, _Column]] = field(default_factory=list)
    natural: bool = False

    def resolve(self, column: exp.Column) -> _Column | None:
        """The one output that a column certainly names; a name that two relations have is an error for Spark."""
        name, table = column.args.get("this"), column.args.get("table")
        if type(name) is not exp.Identifier or not _only(column, "this", "table"):
            return None
        wanted = name.name.lower()
        if table is None and (self.natural or wanted in self.unsure):
            return None
        seen = self.seen(table)
        if table is not None and (len(seen) != 1 or seen[0][1].outputs is None):
            return None
        found = _named(wanted, seen)
        if table is None:
            found = [one for one in found if one not in self.covered]
        return found[0] if len(found) == 1 else None

    def seen(self, alias: exp.Expr | None) -> list[tuple[int, _Relation]]:
        """The relations that an expression sees, with their numbers; with an alias, those of this alias."""
        visible = [(number, one) for number, one in enumerate(self.relations) if not one.hidden]
        return visible if alias is None else [one for one in visible if one[1].alias == alias.name.lower()]

    def learn(self, condition: _Condition | None, numbers: Sequence[int]) -> None:
        """Rows of these relations that cannot satisfy the condition do not matter."""
        if condition is None:
            return
        for number in numbers:
            relation = self.relations[number]
            for own in (_on_relation(one, number) for one in self._alike(condition, number)):
                if own is not None and (not relation.optional or _rejects_nulls(own)):
                    relation.conditions.append(own)

    def _alike(self, condition: _Condition, number: int) -> Iterator[_Condition]:
        """The condition, and with columns of this relation in the place of those that an inner join made equal."""
        yield condition
        for pair in self.same:
            for own, other in (pair, pair[::-1]):
                if own.relation == number:
                    moved = _moved(condition, partial(_instead, other, own))
                    if moved is not None and moved != condition:
                        yield moved

    def use(self, name: str, kind: str, left: Sequence[int], right: Sequence[int]) -> None:
        """What a name of USING means from here on: the column of the side of which each row has a value of its own."""
        seen = [one for one in self.seen(None) if one[0] in (*left, *right)]
        mine, theirs = (
            [one for one in _named(name, [two for two in seen if two[0] in side]) if one not in self.covered]
            for side in ((right, left) if kind == "right" else (left, right))
        )
        self.joined.add(name)
        if kind == "full" or len(mine) != 1 or len(theirs) != 1:
            self.unsure.add(name)
            return
        self.covered.add(theirs[0])
        if kind == "inner" and self.kind(mine[0]) is not None and self.kind(mine[0]) == self.kind(theirs[0]):
            self.same.append((mine[0], theirs[0]))

    def kind(self, column: _Column) -> IcebergType | None:
        outputs = self.relations[column.relation].outputs
        return None if outputs is None else outputs[column.place].kind

    def join(self, kind: str, condition: _Condition | None, left: Sequence[int], right: Sequence[int]) -> None:
        """What a join shows about both sides below it, and what it does to them for all above it."""
        touched = {"left": [*right], "anti": [*right], "right": [*left], "full": []}
        self.learn(condition, touched.get(kind, [*left, *right]))
        for number in (*left, *right):
            mine = "left" if number in left else "right"
            if kind == "full" or (kind in ("left", "right") and kind != mine):
                self.relations[number].optional = True
            if kind in ("semi", "anti") and mine == "right":
                self.relations[number].hidden = True


def _named(name: str, seen: Sequence[tuple[int, _Relation]]) -> list[_Column]:
    return [
        _Column(number, place)
        for number, relation in seen
        for place, output in enumerate(relation.outputs or ())
        if output.name == name
    ]


def _instead(old: _Column, new: _Column, test: _Test) -> _Test:
    same = (test.column.relation, test.column.place) == (old.relation, old.place)
    return replace(test, column=replace(new, as_day=test.column.as_day)) if same else test


@dataclass(frozen=True)
class _Block:
    """A SELECT: its FROM, its outputs, and the queries in its expressions.

    `sources` are the columns of its FROM that its outputs are; None if a condition on its outputs cannot move inside.
    """

    origin: _From
    outputs: Sequence[_Output] | None
    sources: Sequence[_Column | None] | None
    inner: Sequence[_Derived]


# Arguments that a SELECT may have. They filter, order or group what WHERE has left, or nothing at all.
_ENDINGS = ("order", "distribute", "sort", "cluster", "limit", "offset")
_CLAUSES = ("with_", "expressions", "distinct", "laterals", "joins", "from_", "where", "group", "having", "windows")
# With these, what becomes of a row depends on other rows, or one row becomes several. DISTINCT and GROUP BY do not
# count: a column that is selected as it is has one value in each group, or Spark refuses the query.
_GATHERING = ("windows", "limit", "offset", "laterals")
_JOINS = {
    **dict.fromkeys((("", ""), ("", "INNER"), ("", "CROSS")), "inner"),
    **dict.fromkeys((("LEFT", ""), ("LEFT", "OUTER")), "left"),
    **dict.fromkeys((("RIGHT", ""), ("RIGHT", "OUTER")), "right"),
    **dict.fromkeys((("FULL", ""), ("FULL", "OUTER")), "full"),
    **dict.fromkeys((("", "SEMI"), ("LEFT", "SEMI")), "semi"),
    **dict.fromkeys((("", "ANTI"), ("LEFT", "ANTI")), "anti"),
}
# What the expressions of a query may consist of if a condition moves into it: one value for one row, always the same.
_STEADY = frozenset(
    {
        *(exp.Column, exp.Identifier, exp.Alias, exp.Star, exp.Literal, exp.Null, exp.Boolean, exp.Paren),
        *(exp.Cast, exp.TryCast, exp.DataType, exp.DataTypeParam, exp.And, exp.Or, exp.Not, exp.Between, exp.In),
        *(exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.NullSafeEQ, exp.NullSafeNEQ, exp.Neg, exp.Like),
        *(exp.Is, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Case, exp.If, exp.Coalesce, exp.Concat),
        *(exp.Upper, exp.Lower, exp.Where, exp.Dot, exp.Interval, exp.Var, exp.Substring, exp.Trim, exp.Length),
        *(exp.Year, exp.Month, exp.Day, exp.Extract, exp.DateTrunc, exp.TimestampTrunc, exp.Round, exp.Abs),
        *(exp.Greatest, exp.Least, exp.Bracket, exp.Count, exp.Sum, exp.Min, exp.Max, exp.Avg, exp.Distinct),
        *(exp.Group, exp.Having),
    }
)


class _Reads:
    """Walks a query and gathers what each read of a table needs."""

    def __init__(self, tables: Mapping[str, Schema]) -> None:
        self._tables = {name.lower(): name for name in tables}
        self._fields = {name: user_fields(schema) for name, schema in tables.items()}
        self._wheres: dict[str, list[str | None]] = {}
        self._whole: set[str] = set()
        self._blocks: dict[int, _Block] = {}
        self._scopes: dict[int, _Names] = {}
        self._defined: list[_Derived] = []
        self._visited: set[int] = set()
        self._visits = 0

    def of(self, tree: exp.Expr) -> tuple[dict[str, str | None], set[str]]:
        """The condition of each table that is read, if there is one, and the tables that need all their columns."""
        self._visit(_Derived(tree, {}), None)
        for named in self._defined:  # grows meanwhile
            if id(named.query) not in self._visited:
                self._visit(named, None)
        found: dict[str, str | None] = {}
        for table, texts in self._wheres.items():
            known = [text for text in dict.fromkeys(texts) if text is not None]
            found[table] = _joined("OR", known) if known and None not in texts else None
        return found, {*self._tables.values()} if _has_other_star(tree) else self._whole

    # ── queries ──

    def _visit(self, read: _Derived, wanted: _Condition | None) -> None:
        """Gather what a query reads if only these of its rows are wanted."""
        self._visits += 1
        self._visited.add(id(read.query))
        if self._visits > _VISITS_MAX:
            raise _Unsure
        query, names = read.query, self._names(read)
        match type(query):
            case exp.Select:
                self._visit_select(query, names, wanted)
                return
            case exp.Subquery:
                _check_only(query, "this", "alias", "with_", *_ENDINGS)
                sides = ["this"]
            case exp.Union | exp.Intersect | exp.Except:
                _check_only(query, "this", "expression", "distinct", "with_", *_ENDINGS)
                sides = ["this", "expression"]
            case exp.Values:
                sides = []
            case _:
                raise _Unsure
        passed = self._passed(read, wanted)
        for side in sides:
            self._visit(_Derived(query.args[side], names), passed)
        for inner in _queries_in(query, names, (*sides, "alias", "with_")):
            self._visit(inner, None)

    def _passed(self, read: _Derived, wanted: _Condition | None) -> _Condition | None:
        """What the parts of a set operation, or a query in parentheses, have to pass on."""
        query, outputs = read.query, self._outputs(read)
        known = wanted is not None and outputs is not None and type(query) in (exp.Union, exp.Subquery)
        if wanted is None or not known or query.args.get("limit") or query.args.get("offset"):
            return None
        # The parts of a union become one type, so a literal may mean something else for a part of another type.
        return _moved(wanted, lambda test: test if outputs and outputs[test.column.place].kind is not None else None)

    def _visit_select(self, query: exp.Expr, names: _Names, wanted: _Condition | None) -> None:
        block = self._block(query, names)
        relations = [replace(one, conditions=[*one.conditions]) for one in block.origin.relations]
        if wanted is not None and block.sources is not None:
            sources = block.sources
            inside = _moved(wanted, lambda test: _inside(test, sources))
            replace(block.origin, relations=relations).learn(inside, range(len(relations)))
        for relation in relations:
            condition = _every(relation.conditions)
            if isinstance(relation.source, str):
                fields = self._fields[relation.source]
                text = None if condition is None else _rendered(condition, fields)
                self._wheres.setdefault(relation.source, []).append(text)
            elif relation.source is not None:
                self._visit(relation.source, None if condition is None else _moved(condition, _alone))
        for inner in block.inner:
            self._visit(inner, None)

    def _names(self, read: _Derived) -> _Names:
        """The WITH names that a query sees: those around it, and its own, each of which sees the ones before it."""
        clause = read.query.args.get("with_")
        if clause is None:
            return read.names
        if id(read.query) not in self._scopes:
            _check_only(clause, "expressions")
            names = dict(read.names)
            for one in clause.expressions:
                _check_only(one, "this", "alias")
                named = _Derived(one.this, dict(names), renamed=_has_columns(one))
                self._defined.append(named)
                names[one.alias.lower()] = named
            self._scopes[id(read.query)] = names
        return self._scopes[id(read.query)]

    # ── outputs ──

    def _outputs(self, read: _Derived) -> Sequence[_Output] | None:
        query, names = read.query, self._names(read)
        if read.renamed:
            return None
        match type(query):
            case exp.Select:
                return self._block(query, names).outputs
            case exp.Subquery:
                return self._outputs(_Derived(query.this, names))
            case exp.Union | exp.Intersect | exp.Except:
                left = self._outputs(_Derived(query.this, names))
                right = self._outputs(_Derived(query.args["expression"], names))
                if left is None or right is None or len(left) != len(right):
                    return None
                return [a if a.kind == b.kind else _Output(a.name) for a, b in zip(left, right, strict=True)]
        return None

    def _block(self, query: exp.Expr, names: _Names) -> _Block:
        if id(query) not in self._blocks:
            self._blocks[id(query)] = self._new_block(query, names)
        return self._blocks[id(query)]

    def _new_block(self, query: exp.Expr, names: _Names) -> _Block:
        _check_only(query, *_CLAUSES, *_ENDINGS)
        if query.args.get("distinct") is not None:
            _check_only(query.args["distinct"])
        origin, inner = _From(), []
        if query.args.get("from_") is not None:
            _check_only(query.args["from_"], "this")
            inner += self._add_joined(origin, query.args["from_"].this, query.args.get("joins") or (), names)[1]
        for view in query.args.get("laterals") or ():
            origin.relations.append(_Relation(None, view.alias.lower() or None, None))
        where = query.args.get("where")
        if where is not None:
            origin.learn(_translate(where.this, origin.resolve), range(len(origin.relations)))
        inner += _queries_in(query, names, ("with_", "from_", "joins"))
        if _starred(query, origin):
            self._whole |= {one.source for one in origin.relations if isinstance(one.source, str)}
        found = _selected(query, origin)
        outputs = None if found is None else [output for output, _ in found]
        passes = found is not None and not any(query.args.get(name) for name in _GATHERING) and _is_steady(query)
        return _Block(origin, outputs, [source for _, source in found] if found and passes else None, inner)

    # ── relations ──

    def _add_joined(
        self, origin: _From, first: exp.Expr, joins: Sequence[exp.Expr], names: _Names, *known: str
    ) -> tuple[list[int], list[_Derived]]:
        """Add a relation and those joined to it. Returns their numbers, and the queries in their expressions."""
        left, inner = self._add(origin, first, names, *known)
        for join in joins:
            _check_only(join, "this", "on", "side", "kind", "using", "method")
            side, kind, method = (str(join.args.get(name) or "").upper() for name in ("side", "kind", "method"))
            if (side, kind) not in _JOINS or method not in ("", "NATURAL"):
                raise _Unsure
            right, more = self._add(origin, join.this, names)
            inner += more + _queries_in(join, names, ("this",))
            origin.natural |= method == "NATURAL"
            for name in join.args.get("using") or ():
                origin.use(name.name.lower(), _JOINS[side, kind], left, right)
            on = join.args.get("on")
            condition = None if on is None else _translate(on, origin.resolve)
            origin.join(_JOINS[side, kind], condition, left, right)
            left = [*left, *right]
        return left, inner

    def _add(self, origin: _From, node: exp.Expr, names: _Names, *known: str) -> tuple[list[int], list[_Derived]]:
        kind, inner = type(node), []
        if kind is exp.Subquery and type(node.this) is exp.Table:
            _check_only(node, "this")
            return self._add_joined(origin, node.this, node.this.args.get("joins") or (), names, "joins")
        alias = str(node.alias).lower() or None
        if kind is exp.Table and type(node.this) is exp.Identifier:
            _check_only(node, "this", "alias", "db", "catalog", *known)
            relation = self._relation(node, alias, names)
        elif kind is exp.Subquery:
            derived = _Derived(node, names)
            relation = _Relation(derived, alias, self._outputs(derived))
        elif kind in (exp.Table, exp.Values, exp.Lateral):
            if kind is exp.Table:
                _check_only(node, "this", "alias")
            relation, inner = _Relation(None, alias, None), _queries_in(node, names, ("alias",))
        else:
            raise _Unsure
        if _has_columns(node):
            relation.outputs = None
            if isinstance(relation.source, str):
                # The alias names its columns by their places.
                self._whole.add(relation.source)
        origin.relations.append(relation)
        return [len(origin.relations) - 1], inner

    def _relation(self, node: exp.Expr, alias: str | None, names: _Names) -> _Relation:
        name = node.name.lower()
        if node.args.get("db") is not None:
            return _Relation(None, alias or name, None)
        if name in names:
            return _Relation(names[name], alias or name, self._outputs(names[name]))
        if name not in self._tables:
            return _Relation(None, alias or name, None)
        table = self._tables[name]
        outputs = [_Output(one.name.lower(), one.field_type) for one in self._fields[table]]
        return _Relation(table, alias or name, outputs)


def _check_only(node: exp.Expr, *names: str) -> None:
    if not _only(node, *names):
        raise _Unsure


def _has_columns(node: exp.Expr) -> bool:
    """Whether its alias renames its columns."""
    alias = node.args.get("alias")
    return isinstance(alias, exp.TableAlias) and bool(alias.args.get("columns"))


def _queries_in(node: exp.Expr, names: _Names, skipped: Sequence[str]) -> list[_Derived]:
    """The queries in the expressions of a node. A relation there belongs to a clause that is not known."""
    found = []
    for part in _parts(node, skipped):
        if isinstance(part, exp.Query | exp.Values):
            found.append(_Derived(part, names))
        elif isinstance(part, exp.Table | exp.From | exp.Join | exp.Command | exp.Pivot):
            raise _Unsure
    return found


def _parts(node: exp.Expr, skipped: Sequence[str]) -> Iterator[exp.Expr]:
    """All nodes below, down to queries and not into them."""
    waiting = [value for name, value in node.args.items() if name not in skipped]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, exp.Expr):
            yield part
            if not isinstance(part, exp.Query | exp.Values):
                waiting += part.args.values()


def _starred(query: exp.Expr, origin: _From) -> bool:
    """Whether a SELECT reads columns of its relations that it does not name: by a star, or by NATURAL."""
    items = [item.this if type(item) is exp.Column else item for item in query.expressions]
    return origin.natural or any(type(item) is exp.Star for item in items)


def _has_other_star(tree: exp.Expr) -> bool:
    """Whether there is a star that is no item of a SELECT and no `count(*)`, or one of a relation that is elsewhere."""
    for star in tree.find_all(exp.Star):
        item = star.parent if type(star.parent) is exp.Column else star
        above = item.parent if item is not None else None
        if type(above) is exp.Count and item is star:
            continue
        if type(above) is not exp.Select or (item is not star and not _is_of(above, item)):
            return True
    return False


def _is_of(query: exp.Expr, item: exp.Expr | None) -> bool:
    """Whether `alias.*` in a SELECT is of a relation in its own FROM."""
    alias = "" if item is None else item.text("table").lower()
    first = query.args.get("from_")
    joined = [join.this for join in query.args.get("joins") or ()]
    return any(str(one.alias_or_name).lower() == alias for one in [*([first.this] if first else []), *joined])


def _selected(query: exp.Expr, origin: _From) -> list[tuple[_Output, _Column | None]] | None:
    """The outputs of a SELECT and the columns that they are; None if their number is not certain."""
    found: list[tuple[_Output, _Column | None]] = []
    for item in query.expressions:
        starred = item if type(item) is exp.Star else item.this if type(item) is exp.Column else None
        if type(starred) is exp.Star:
            table = item.args.get("table")
            relations = origin.seen(table)
            named = table is None or (len(relations) == 1 and _only(item, "this", "table"))
            if not named or not _only(starred) or origin.natural or origin.joined:
                return None
            for number, relation in relations:
                if relation.outputs is None:
                    return None
                found += [(one, _Column(number, place)) for place, one in enumerate(relation.outputs)]
            continue
        value = item.this if type(item) is exp.Alias else item
        if type(item) is not exp.Alias and not all(type(part) in _STEADY for part in value.walk()):
            return None  # a function may give several columns
        source = _operand(value, origin.resolve)
        named_as = item.alias_or_name.lower() if type(item) in (exp.Alias, exp.Column) else None
        found.append((_Output(named_as, _kind(source, origin)), source))
    return found


def _kind(source: _Column | None, origin: _From) -> IcebergType | None:
    if source is None:
        return None
    kind = origin.kind(source)
    return DateType() if source.as_day and kind is not None else kind


def _is_steady(query: exp.Expr) -> bool:
    """Whether the expressions of a SELECT give the same for a row, or for a group, whatever other ones there are."""
    parts = [
        *query.expressions,
        *(query.args.get(name) for name in ("where", "group", "having")),
        *(join.args.get("on") for join in query.args.get("joins") or ()),
    ]
    return all(type(node) in _STEADY for part in parts if part is not None for node in part.walk())


def _inside(test: _Test, sources: Sequence[_Column | None]) -> _Test | None:
    """A test of an output as one of the column that it is."""
    source = sources[test.column.place]
    if source is None:
        return None
    return replace(test, column=replace(source, as_day=source.as_day or test.column.as_day))


def _alone(test: _Test) -> _Test:
    """The test of a query's output, where the query is the only relation."""
    return replace(test, column=replace(test.column, relation=0))


# ── as text ──

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_WHOLE_DAY = timedelta(days=1)


def _joined(word: str, texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f" {word} ".join(f"({text})" for text in texts)


def _rendered(condition: _Condition, fields: Sequence[NestedField]) -> str | None:
    """The condition on a table in Spark SQL, as far as it can be written in a form that prunes files."""
    if isinstance(condition, _Test):
        return _test_text(condition, fields[condition.column.place])
    texts = [_rendered(part, fields) for part in condition.parts]
    known = list(dict.fromkeys(text for text in texts if text is not None))
    if isinstance(condition, _Every):
        return _joined("AND", known) if known else None
    return _joined("OR", known) if None not in texts else None


def _test_text(test: _Test, column: NestedField) -> str | None:
    name, kind = column.name, column.field_type
    if not _NAME.fullmatch(name) or NO_COLUMN.fullmatch(name):
        return None
    if isinstance(kind, TimestampType | TimestamptzType):
        return _moment_text(test, name)
    if test.column.as_day and not isinstance(kind, DateType):
        return None
    if not test.values:
        return f"{name} {test.sign.upper()}"
    texts = [_value_text(value, kind) for value in test.values]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    if test.sign == "in" and len(known) > _VALUES_MAX:
        known.sort(key=int if isinstance(kind, IntegerType | LongType) else lambda text: text[1:-1])
        return f"({name} >= {known[0]}) AND ({name} <= {known[-1]})"
    value = f"({', '.join(known)})" if test.sign in ("in", "not in") else known[0]
    return f"{name} {test.sign.upper()} {value}"


def _value_text(value: _Value, kind: IcebergType) -> str | None:
    """The literal as it is compared with a column of this type; None if Spark would convert the column."""
    match kind:
        case IntegerType() | LongType():
            return value.text if value.kind == "number" else None
        case BooleanType():
            return value.text if value.kind == "boolean" else None
        case StringType():
            return f"'{value.text}'" if value.kind == "text" else None
        case DateType():
            return f"'{value.text}'" if value.kind in ("text", "date") and _DAY.fullmatch(value.text) else None
    return None


def _moment_text(test: _Test, name: str) -> str | None:
    """A condition on a timestamp, or on its day in the session's zone."""
    if not test.values:
        return f"{name} {test.sign.upper()}"
    if test.sign == "in":
        texts = [_moment_text(replace(test, sign="=", values=(value,)), name) for value in test.values]
        known = [text for text in texts if text is not None]
        return _joined("OR", known) if len(known) == len(texts) else None
    value = test.values[0]
    if test.sign not in _TURNED:
        return None
    if test.column.as_day:
        return _day_text(test.sign, value, name)
    match value.kind:
        case "text":
            return f"{name} {test.sign} '{value.text}'"
        case "date" | "timestamp" | "timestamp_ntz":
            return f"{name} {test.sign} {value.kind.upper()} '{value.text}'"
    return None


def _day_text(sign: str, value: _Value, name: str) -> str | None:
    if value.kind not in ("text", "date") or not _DAY.fullmatch(value.text):
        return None
    try:
        day = date.fromisoformat(value.text)
        after = day + _WHOLE_DAY
    except (ValueError, OverflowError):
        return None
    lowest, behind = f"{name} >= TIMESTAMP '{day}'", f"{name} < TIMESTAMP '{after}'"
    match sign:
        case "=":
            return _joined("AND", [lowest, behind])
        case "<":
            return f"{name} < TIMESTAMP '{day}'"
        case "<=":
            return behind
        case ">":
            return f"{name} >= TIMESTAMP '{after}'"
        case ">=":
            return lowest
    return None
