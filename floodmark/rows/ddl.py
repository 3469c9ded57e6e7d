"""Spark's DDL text for a schema, parsed without Spark: `id long not null, tags array<string> comment 'free words'`.

A hand-written parser over a token list: types in any case, NOT NULL, COMMENT, names in backquotes, any nesting. The
result is an Iceberg struct whose field ids are placeholders; `schema.table_schema` assigns the real ones. Text that
cannot be parsed, or a type that a table cannot hold, is `Invalid` with the position in the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pyiceberg.types import DecimalType, IcebergType, ListType, MapType, NestedField, StructType

from floodmark.errors import Invalid
from floodmark.rows.primitives import BY_NAME, DECIMAL_ADVICE, is_decimal

# Types that a table cannot hold, and what to write instead.
UNSUPPORTED = {
    "void": "Give the column a real type.",
    "null": "Give the column a real type.",
    "time": "Use a long of microseconds, or a string.",
    "uuid": "Use string.",
    "fixed": "Use binary.",
    "interval": "Use a long in a unit of your choice.",
    "char": "Use string.",
    "varchar": "Use string.",
    "variant": "Use string, or a struct.",
    "geometry": "Use binary.",
    "geography": "Use binary.",
    "timestamp_ns": "Use timestamp_ntz (microseconds).",
    "timestamptz_ns": "Use timestamp (microseconds).",
}
DECIMALS = frozenset({"decimal", "dec", "numeric"})

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>\w+)|(?P<sign>[<>(),:]))",
    re.UNICODE,
)


class Token(NamedTuple):
    kind: str
    text: str
    position: int


def _tokens(ddl: str) -> list[Token]:
    tokens: list[Token] = []
    at = 0
    while ddl[at:].strip():
        match = _TOKEN.match(ddl, at)
        if match is None or match.lastgroup is None:
            position = at + len(ddl[at:]) - len(ddl[at:].lstrip())
            raise _wrong(ddl, position, "unreadable text")
        tokens.append(Token(match.lastgroup, match.group(match.lastgroup), match.start(match.lastgroup)))
        at = match.end()
    tokens.append(Token("end", "", len(ddl)))
    return tokens


def _wrong(ddl: str, position: int, problem: str, *, column: str | None = None, advice: str = "") -> Invalid:
    near = ddl[position : position + 20] or "the end"
    return Invalid(
        f"invalid schema text: {problem}",
        position=position,
        near=repr(near),
        column=column,
        advice=advice or "Write it like: id long not null, ts timestamp, tags array<string>.",
    )


class _Parser:
    def __init__(self, ddl: str) -> None:
        self.ddl = ddl
        self.tokens = _tokens(ddl)
        self.at = 0
        self.path: list[str] = []

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.next
        self.at += 1
        return token

    def accept(self, *words: str) -> bool:
        """Take the next tokens if they are these words or signs, in any case."""
        ahead = self.tokens[self.at : self.at + len(words)]
        if [token.text.lower() for token in ahead if token.kind in ("word", "sign")] != list(words):
            return False
        self.at += len(words)
        return True

    def expect(self, sign: str) -> None:
        if not self.accept(sign):
            raise self.wrong(f"{sign!r} is missing here")

    def wrong(self, problem: str, token: Token | None = None, advice: str = "") -> Invalid:
        column = ".".join(self.path) or None
        return _wrong(self.ddl, (token or self.next).position, problem, column=column, advice=advice)

    def name(self) -> str:
        token = self.take()
        if token.kind == "quoted":
            return token.text[1:-1].replace("``", "`")
        if token.kind == "word":
            return token.text
        raise self.wrong("a column name is missing here", token)

    def fields(self, closing: str) -> StructType:
        fields = [self.field(nested=bool(closing))]
        while self.accept(","):
            fields.append(self.field(nested=bool(closing)))
        return StructType(*fields)

    def field(self, *, nested: bool) -> NestedField:
        name = self.name()
        self.path.append(name)
        if nested:
            self.accept(":")
        kind = self.type()
        required = self.accept("not", "null")
        doc = self.comment() if self.accept("comment") else None
        self.path.pop()
        return NestedField(field_id=-1, name=name, field_type=kind, required=required, doc=doc)

    def comment(self) -> str:
        token = self.take()
        if token.kind != "text":
            raise self.wrong("COMMENT needs a text in quotes", token)
        return re.sub(r"\\(.)", r"\1", token.text[1:-1])

    def type(self) -> IcebergType:
        token = self.take()
        word = token.text.lower()
        if token.kind != "word":
            raise self.wrong("a type is missing here", token)
        if word in UNSUPPORTED:
            raise self.wrong(f"a table cannot hold the type {word}", token, UNSUPPORTED[word])
        if word in BY_NAME:
            return BY_NAME[word]
        if word in DECIMALS:
            return self.decimal(token)
        if word == "array":
            self.expect("<")
            element = self.type()
            self.expect(">")
            return ListType(element_id=-1, element_type=element, element_required=False)
        if word == "map":
            self.expect("<")
            key = self.type()
            self.expect(",")
            value = self.type()
            self.expect(">")
            return MapType(key_id=-1, key_type=key, value_id=-1, value_type=value, value_required=False)
        if word == "struct":
            self.expect("<")
            struct = self.fields(">")
            self.expect(">")
            return struct
        raise self.wrong(f"unknown type {token.text}", token)

    def decimal(self, token: Token) -> IcebergType:
        precision, scale = 10, 0
        if self.accept("("):
            precision = self.number()
            if self.accept(","):
                scale = self.number()
            self.expect(")")
        if not is_decimal(precision, scale):
            raise self.wrong(f"decimal({precision},{scale}) is out of range", token, DECIMAL_ADVICE)
        return DecimalType(precision, scale)

    def number(self) -> int:
        token = self.take()
        if not token.text.isdigit():
            raise self.wrong("a number is missing here", token)
        return int(token.text)


def parse_ddl(ddl: str) -> StructType:
    """The columns that Spark DDL text declares, with placeholder field ids."""
    parser = _Parser(ddl)
    if parser.next.kind == "end":
        raise _wrong(ddl, 0, "it has no columns")
    struct = parser.fields("")
    if parser.next.kind != "end":
        raise parser.wrong("a comma or the end is missing here")
    return struct
