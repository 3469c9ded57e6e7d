"""Path templates: the names of a chunk's files, from the chunk's ends. Pure, except for the working folder.

Fields are {start}, {end} and {number}; their formats are those of Python: {start:%Y/%m/%d} for times, which are UTC,
{start:08d} for numbers. Double a brace that belongs to the path. A local path is made absolute, so that a job
continues with the same files from another folder. A wrong template is Invalid when it is made, and the error names it.
Whether it fits a history is checked when it is used with one: also that no two chunks or steps have the same file, as
far as the calendar goes, since its rows would be loaded twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from string import Formatter

from floodmark.backfill.chunks.geometry import NUMBER, TIME, Chunk, Geometry, RangeValue
from floodmark.errors import Invalid

STEPS_MAX = 10_000
_DAY = 86_400_000_000
# Formats repeat by the minute, hour, day, month or year: so many files are compared one by one, at least those of a
# day; then, if a day has a whole number of them, one of each day. A two-digit year is unique for less than a hundred
# years: an open range counts as that long.
_COMPARED_MIN, _COMPARED_MAX = 10_000, 40_000
_OPEN_DAYS = 99 * 365
_FIELDS = ("start", "end", "number")
_WHOLE_FORMAT = re.compile(r"[+-]?0?[0-9]{0,2}[dxX]?")
_DIRECTIVE = re.compile(r"%(.?)", re.DOTALL)
_DIRECTIVES = frozenset("YmdHMSfjyGVuUW%")
_ADVICE = "Write it like data/{start:%Y/%m/%d}.jsonl for times, or data/{start:08d}-{end:08d}.csv for numbers."


class Template:
    """A path with fields. `unit`: what its formats are for, None if they do not determine it."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text.strip():
            raise Invalid("a path template must be text", template=repr(text), advice=_ADVICE)
        self.text = _absolute(text)
        self._parts = _parse(self.text)
        self.fields = {field for _, field, _ in self._parts if field}
        if not self.fields:
            raise Invalid(
                "the path template has no field: every chunk would be read from the same files",
                template=text,
                advice=_ADVICE,
            )
        self.unit = _unit(text, [(field, spec) for _, field, spec in self._parts if field])

    def check(self, geometry: Geometry, step: int | None) -> None:
        """Refuse a template that does not fit this history. `step` is an inner value."""
        if self.unit not in (None, geometry.unit):
            raise Invalid(
                "the path template's formats do not fit the history",
                template=self.text,
                template_is_for=self.unit,
                history_is_of=geometry.unit,
                advice=_ADVICE,
            )
        if geometry.unit == TIME and any(field in ("start", "end") and not spec for _, field, spec in self._parts):
            raise Invalid("a time in a path needs a format", template=self.text, advice=_ADVICE)
        if step is not None:
            self._check_step(geometry, step)
        if geometry.unit == TIME and (step is not None or "number" not in self.fields):
            self._check_once(geometry, step)

    def _check_step(self, geometry: Geometry, step: int) -> None:
        if not self.fields & {"start", "end"}:
            raise Invalid("a template with a step needs {start} or {end}", template=self.text)
        ends = [geometry.size, geometry.first - geometry.origin]
        ends += [] if geometry.last is None else [geometry.last - geometry.origin]
        if step <= 0 or any(end % step for end in ends):
            raise Invalid(
                "chunks cannot be cut into whole steps",
                step=step if geometry.unit == NUMBER else f"{step}us",
                advice="The step has to divide the chunk's size, and the range's ends have to be at whole steps.",
            )
        if geometry.size // step > STEPS_MAX:
            raise Invalid("a chunk has too many steps", steps=geometry.size // step, most=STEPS_MAX)

    def _check_once(self, geometry: Geometry, step: int | None) -> None:
        """Refuse a template by which two chunks or steps have the same file."""
        seen: dict[str, int] = {}
        for start, end in _files(geometry, step):
            path = self._expand(geometry.number_of_inner(start), geometry.shown(start), geometry.shown(end))
            other = seen.setdefault(path, start)
            if other != start:
                chunk, again = (geometry.chunk(geometry.number_of_inner(one)) for one in (other, start))
                raise _read_twice(path, chunk, again)

    def paths(self, chunk: Chunk, geometry: Geometry, step: int | None) -> list[str]:
        """The paths of a chunk, one for each step. A file that two chunks or steps would read is Invalid: its rows
        would be loaded twice.
        """
        found = self._expanded(chunk, geometry, step)
        seen = set(found)
        if len(seen) < len(found):
            raise _read_twice(next(path for path in found if found.count(path) > 1), chunk)
        for number in (chunk.number - 1, chunk.number + 1):
            if geometry.has(number):
                both = seen.intersection(self._expanded(geometry.chunk(number), geometry, step))
                if both:
                    raise _read_twice(min(both), chunk)
        for path in found:
            _check_readable(path)
        return found

    def _expanded(self, chunk: Chunk, geometry: Geometry, step: int | None) -> list[str]:
        if step is None:
            return [self._expand(chunk.number, chunk.start, chunk.end)]
        low, high = geometry.ends(chunk.number)
        return [
            self._expand(chunk.number, geometry.shown(start), geometry.shown(start + step))
            for start in range(low, high, step)
        ]

    def _expand(self, number: int, start: RangeValue, end: RangeValue) -> str:
        values: dict[str, RangeValue] = {"start": start, "end": end, "number": number}
        return "".join(literal + (format(values[field], spec) if field else "") for literal, field, spec in self._parts)


def _files(geometry: Geometry, step: int | None) -> Iterator[tuple[int, int]]:
    """The part of the range that a file covers, for every compared file."""
    size = step or geometry.size
    stop = geometry.last
    if stop is None:
        stop = min(geometry.first + _OPEN_DAYS * _DAY, geometry.value("9999-01-01"))
    # The first chunk may be cut; all others follow from the start of the second.
    second = geometry.first + size - (geometry.first - geometry.origin) % size
    yield geometry.first, min(second, stop)
    by_day = _DAY % size == 0
    near = second + max(_DAY // size if by_day else _COMPARED_MAX, _COMPARED_MIN) * size
    yield from ((start, min(start + size, stop)) for start in range(second, min(near, stop), size))
    if by_day:
        far = second + _COMPARED_MAX * _DAY
        yield from ((start, min(start + size, stop)) for start in range(second, min(far, stop), _DAY))


def absolute_path(path: str) -> str:
    """A local path, made independent of the working folder; an address unchanged."""
    return path if "://" in path or path.startswith("file:") else os.path.abspath(os.path.expanduser(path))


def _absolute(template: str) -> str:
    if "://" in template or template.startswith(("file:", "/", "~")):
        return os.path.expanduser(template)
    # Braces of the working folder are not fields.
    return os.path.normpath(os.path.join(os.getcwd().replace("{", "{{").replace("}", "}}"), template))


def _parse(text: str) -> list[tuple[str, str, str]]:
    try:
        found = list(Formatter().parse(text))
    except ValueError as error:
        raise Invalid(
            "invalid path template",
            template=text,
            cause=str(error),
            advice="Double a brace that belongs to the path.",
        ) from error
    parts = []
    for literal, field, spec, conversion in found:
        if field is not None and (field not in _FIELDS or conversion):
            wrong = f"{{{field}!{conversion}}}" if conversion else f"{{{field}}}"
            raise Invalid(
                "the path template has an unknown field",
                field=wrong,
                template=text,
                advice=f"The fields are {', '.join(f'{{{name}}}' for name in _FIELDS)}.",
            )
        parts.append((literal, field or "", spec or ""))
    return parts


def _unit(template: str, fields: Sequence[tuple[str, str]]) -> str | None:
    units = set()
    for field, spec in fields:
        of_time = field != "number" and "%" in spec
        known = _is_time_format(spec) if of_time else _WHOLE_FORMAT.fullmatch(spec)
        if not known or "{" in spec:
            raise Invalid(
                "the path template has an unknown format",
                field=f"{{{field}:{spec}}}",
                template=template,
                advice=_ADVICE,
            )
        if field != "number" and spec:
            units.add(TIME if of_time else NUMBER)
    if len(units) > 1:
        raise Invalid(
            "the path template has formats of times and of numbers", template=template, advice="Use one kind."
        )
    return units.pop() if units else None


def _is_time_format(spec: str) -> bool:
    return all(directive in _DIRECTIVES and directive for directive in _DIRECTIVE.findall(spec.replace("%%", "")))


def _read_twice(path: str, chunk: Chunk, again: Chunk | None = None) -> Invalid:
    return Invalid(
        "the path template names a file more than once: its rows would be loaded twice",
        path=path,
        chunk=chunk.name,
        again=None if again is None else again.name,
        advice="Name each by its whole time, like %Y/%m/%d and %H for hours, or make chunks as large as the files.",
    )


def _check_readable(path: str) -> None:
    _, _, below = path.partition("://") if "://" in path else ("", "", path.removeprefix("file:"))
    if ":" in below:
        raise Invalid("Spark cannot read names with a colon", path=path, advice="Use a format without one.")
    name = below.rstrip("/").rpartition("/")[2]
    if name.startswith(("_", ".")):
        raise Invalid("Spark ignores files whose names start with _ or a dot", path=path, advice="Rename them.")
