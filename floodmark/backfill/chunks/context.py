"""What a source needs of the lake that it is bound to, and how far its history goes: the tip.

A tip is given by a value, by the clock ("now", "now-10m"), by a small file ("@path") or by a function. It is exclusive:
everything before it is complete; None means that it is unknown. It is stored as JSON, and checked against the history
before a job is created. Reading it changes nothing. A file that is missing or empty is being written: Unavailable, so a
later try reads it again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from floodmark import clock
from floodmark.backfill.chunks.geometry import TIME, Geometry, Value, span_us
from floodmark.backfill.chunks.paths import absolute_path
from floodmark.commit.catalog import Catalog
from floodmark.errors import Invalid, NotFound, Unavailable
from floodmark.rows.session import Sessions

if TYPE_CHECKING:
    from pyiceberg.schema import Schema

TIP_BYTES_MAX = 1024
_FILE_ADVICE = "Write it beside, then rename it into its place: so it is always whole."
_NOW = re.compile(r"now(?: *- *(.+))?")


@dataclass(frozen=True)
class Context:
    """What a source needs of the lake: `schema` gives the columns of the chunk's rows, if a table defines them.

    `filled` names those that rows may omit, because the table fills them.
    """

    catalog: Catalog
    sessions: Sessions
    geometry: Geometry
    schema: Callable[[], Schema | None]
    filled: Callable[[], Sequence[str]] = tuple


def kept_tip(given: Any) -> Any:
    """A tip that is not a function, in the form that JSON can store."""
    if isinstance(given, str):
        _delay_ms(given)
        return "@" + absolute_path(given[1:]) if given.startswith("@") else given
    if given is None or isinstance(given, date):
        return given.isoformat() if given else None
    try:
        return operator.index(given)
    except TypeError as error:
        raise Invalid(
            "this is not a tip", tip=repr(given), advice="Give a number, a time, now-10m or @path."
        ) from error


def _delay_ms(text: str) -> int | None:
    """How long before now a tip is; None if the clock does not determine it."""
    found = _NOW.fullmatch(text.strip())
    return None if found is None else clock.parse_duration_ms(found[1] or "0s")


def check_tip(given: Any, geometry: Geometry) -> None:
    if given is None or callable(given) or (isinstance(given, str) and given.startswith("@")):
        return
    if isinstance(given, str) and _delay_ms(given) is not None:
        if geometry.unit != TIME:
            raise Invalid("a range of numbers has no tip by the clock", tip=given, advice="Give a number, or @path.")
        return
    geometry.value(given)


def tip_value(given: Any, context: Context) -> Value | None:
    found = given() if callable(given) else given
    if found is None:
        return None
    geometry = context.geometry
    if isinstance(found, str):
        delay_ms = _delay_ms(found)
        if delay_ms is not None and geometry.unit == TIME:
            return geometry.shown_within((clock.now_ms() - delay_ms) * 1000)
        if found.startswith("@"):
            return _in_file(found[1:], context)
    return geometry.shown(geometry.value(found))


def _in_file(path: str, context: Context) -> Value:
    try:
        data = context.catalog.storage.read_range(path, 0, TIP_BYTES_MAX + 1)
    except NotFound as error:
        raise Unavailable("the file of the tip is not there", path=path, advice=_FILE_ADVICE) from error
    if not data.strip():
        raise Unavailable("the file of the tip is empty", path=path, advice=_FILE_ADVICE)
    try:
        return context.geometry.shown(context.geometry.value(data.decode().strip()))
    except (Invalid, UnicodeDecodeError) as error:
        raise Invalid("this file does not hold a tip", path=path, found=repr(data[:40]), cause=str(error)) from error


def kept_step(given: Any) -> int | str | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    if isinstance(given, str) and given.strip().isdecimal():
        return int(given)
    span = span_us(given)
    if span % 1000:
        raise Invalid("a step is of whole milliseconds", step=repr(given))
    return given if isinstance(given, str) else f"{span // 1000}ms"


def in_context(context: Context | None) -> Context:
    if context is None:
        raise Invalid("this source is not bound to a lake", advice="A backfill does that: lake.backfill.history(...).")
    return context
