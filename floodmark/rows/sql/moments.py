"""Comparisons of timestamps in a condition: what a match proves in any time zone of the session.

The meaning of `ts < '2024-01-01'` depends on the session's time zone, so only Spark can decide which rows match. But no
zone is more than 18 hours from UTC: in any zone, a row that matches is before 2024-01-02 in UTC. So the literal is read
as a moment, in UTC or in the zone that it names, and bounds are widened by a day. That is enough for columns without a
zone too: Spark moves them or the literal by the session's zone, and times that the clocks skipped by at most a day.
Only text of a strict form is read. All else proves nothing, nor does a bound outside Python's calendar.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from pyiceberg import expressions as ex
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, UnboundPredicate
from pyiceberg.expressions.literals import StringLiteral, TimestampLiteral
from pyiceberg.typedef import LiteralValue
from pyiceberg.types import IcebergType, TimestampType, TimestamptzType
from pyiceberg.utils.datetime import datetime_to_micros

# The words before a text that make it a literal, as in TIMESTAMP '2024-01-01'.
TYPE_WORDS = frozenset({"timestamp", "timestamp_ntz", "date"})
_TYPED = "\x1f"
_MOMENT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(?:(?P<mark>[ T])[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})?)?"
)
_ZONE_MAX = timedelta(hours=18)
_DAY = timedelta(days=1)
# With a setting for old queries, Spark compares a timestamp, written in the session's zone, with bare text as text.
# Then a T sorts after all hours of its day, and a zone in the text is ignored: a day and twice the widest zone. (In
# that mode, years of five digits sort before all others. That is not modelled here.)
_AS_TEXT = timedelta(days=3)
_FIRST, _LAST = datetime_to_micros(datetime.min), datetime_to_micros(datetime.max)


def typed_text(word: str, text: str) -> str:
    """The word and the quoted text as one quoted text, which differs from every text of a condition."""
    return f"'{_TYPED}{word.lower()} {text[1:]}"


def is_typed(text: str) -> bool:
    return text.startswith(_TYPED)


def untyped_day(text: str) -> str:
    """The text of a literal of type DATE; any other text as it is."""
    return text.removeprefix(f"{_TYPED}date ")


def widened(predicate: UnboundPredicate, kind: IcebergType) -> BooleanExpression:
    """What is true for every row that matches the comparison in some time zone; always true if that is unknown."""
    if not isinstance(kind, TimestampType | TimestamptzType) or not isinstance(predicate, ex.LiteralPredicate):
        return AlwaysTrue()
    reach = _reach(predicate.literal)
    if reach is None:
        return AlwaysTrue()
    lowest, highest = reach
    match predicate:
        case ex.EqualTo():
            return And(
                _bound(ex.GreaterThanOrEqual, predicate.term, lowest),
                _bound(ex.LessThanOrEqual, predicate.term, highest),
            )
        case ex.LessThan() | ex.LessThanOrEqual():
            return _bound(type(predicate), predicate.term, highest)
        case ex.GreaterThan() | ex.GreaterThanOrEqual():
            return _bound(type(predicate), predicate.term, lowest)
    return AlwaysTrue()


def _bound(comparison: type[ex.LiteralPredicate], term: ex.UnboundTerm, micros: int) -> BooleanExpression:
    if not _FIRST <= micros <= _LAST:
        return AlwaysTrue()
    return comparison(term, TimestampLiteral(micros))


def _reach(literal: LiteralValue) -> tuple[int, int] | None:
    """The first and the last microsecond that the literal may denote; None if it does not have the strict form."""
    if not isinstance(literal, StringLiteral):
        return None
    word, text = "", literal.value
    if is_typed(text):
        word, _, text = text.removeprefix(_TYPED).partition(" ")
    found = _MOMENT.fullmatch(text)
    # Spark ignores the time of a DATE, and the zone of a TIMESTAMP_NTZ: such a literal does not mean what it says.
    if found is None or (word == "date" and found["mark"]) or (word == "timestamp_ntz" and found["zone"]):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    elif abs(moment.utcoffset() or timedelta()) > _ZONE_MAX:
        return None
    slack = _AS_TEXT if not word and (found["mark"] == "T" or found["zone"]) else _DAY
    slack_micros = slack // timedelta(microseconds=1)
    return datetime_to_micros(moment) - slack_micros, datetime_to_micros(moment) + slack_micros
