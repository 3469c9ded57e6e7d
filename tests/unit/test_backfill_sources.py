"""Sources of history without rows: path templates, tips, functions, and what another process makes of kept settings."""

from __future__ import annotations

import json
import os
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from floodmark import clock
from floodmark.backfill.chunks.geometry import Chunk, Geometry
from floodmark.backfill.chunks.sources import (
    CallSource,
    HistorySource,
    PathSource,
    SourceContext,
    TableSource,
    bind,
    source_as_dict,
    source_from_dict,
    to_source,
)
from floodmark.errors import Corrupt, Invalid

DAYS = Geometry.of("2024-01-01", "2024-02-01", "1d")
NUMBERS = Geometry.of(0, 10_000, 1000)


def context(geometry: Geometry) -> SourceContext:
    """Of a lake that must not be asked for anything."""
    nothing: Any = None
    return SourceContext(nothing, nothing, geometry, lambda: None)


def paths(template: str, geometry: Geometry, number: int | None = None, **options: Any) -> list[str]:
    source = bind(PathSource(template, **options), context(geometry))
    assert isinstance(source, PathSource)
    return source.paths(geometry.chunk(geometry.wanted(None).start if number is None else number))


# ── path templates ──


@pytest.mark.parametrize(
    ("template", "geometry", "step", "expected"),
    [
        ("/d/{start:%Y/%m/%d}.jsonl", DAYS, None, ["/d/2024/01/01.jsonl"]),
        ("/d/{start:%Y%m%d}-{end:%Y%m%d}.csv.gz", DAYS, None, ["/d/20240101-20240102.csv.gz"]),
        ("s3a://b/{start:%d}/*.parquet", DAYS, None, ["s3a://b/01/*.parquet"]),
        ("/d/{start:%d-%H}.csv", DAYS, "12h", ["/d/01-00.csv", "/d/01-12.csv"]),
        ("/d/{number}.csv", NUMBERS, None, ["/d/0.csv"]),
        ("/d/{{a,b}}/{number:03d}-{start:05d}-{end:x}.csv", NUMBERS, None, ["/d/{a,b}/000-00000-3e8.csv"]),
        ("/d/{start}.csv", NUMBERS, "250", ["/d/0.csv", "/d/250.csv", "/d/500.csv", "/d/750.csv"]),
        ("file:///d/{end}.csv", NUMBERS, 500, ["file:///d/500.csv", "file:///d/1000.csv"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_template_names_the_files_of_a_chunk(
    template: str, geometry: Geometry, step: Any, expected: list[str]
) -> None:
    assert paths(template, geometry, step=step) == expected


def test_a_relative_template_is_of_the_folder_where_it_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with{brace}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    kept = PathSource("../in/{start}.csv", tip="@./tip").as_dict()
    monkeypatch.chdir(os.sep)
    again = bind(source_from_dict(kept), context(NUMBERS))
    assert isinstance(again, PathSource)
    assert again.paths(NUMBERS.chunk(1)) == [f"{tmp_path}/in/1000.csv"]
    assert again.as_dict() == kept
    assert kept["tip"] == f"@{folder}/tip"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("/d/{begin}.csv", "{begin}"),
        ("/d/{}.csv", "{}"),
        ("/d/{start.year}.csv", "{start.year}"),
        ("/d/{start!r}.csv", "{start!r}"),
        ("/d/{start:%Q}.csv", "{start:%Q}"),
        ("/d/{start:%Y%}.csv", "{start:%Y%}"),
        ("/d/{start:8.2f}.csv", "{start:8.2f}"),
        ("/d/{number:%Y}.csv", "{number:%Y}"),
        ("/d/{start:{number}}.csv", "{start:{number}}"),
        ("/d/{start:%Y}/{end:08d}.csv", "times and of numbers"),
        ("/d/{start.csv", "invalid path template"),
        ("/d/all.csv", "no field"),
        ("", "must be text"),
        ("/d/{start:%Y}", "does not show the format"),
    ],
)
def test_a_wrong_template_is_refused_when_it_is_made(template: str, says: str) -> None:
    with pytest.raises(Invalid) as error:
        PathSource(template)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("template", "geometry", "options", "says"),
    [
        ("/d/{start:%Y}.csv", NUMBERS, {}, "do not fit the history"),
        ("/d/{start:08d}.csv", DAYS, {}, "do not fit the history"),
        ("/d/{start}.csv", DAYS, {}, "needs a format"),
        ("/d/{start:%d}.csv", DAYS, {"step": "7h"}, "whole steps"),
        ("/d/{start:%d}.csv", DAYS, {"step": 5}, "does not fit the range of the history"),
        ("/d/{start}.csv", NUMBERS, {"step": "1h"}, "does not fit the range of the history"),
        ("/d/{start}.csv", NUMBERS, {"step": 0}, "whole steps"),
        ("/d/{start}.csv", NUMBERS, {"step": 2000}, "whole steps"),
        ("/d/{start}.csv", Geometry.of(50, 10_000, 1000), {"step": 100}, "whole steps"),
        ("/d/{number}.csv", NUMBERS, {"step": 100}, "needs {start} or {end}"),
        ("/d/{start}.csv", Geometry.of(0, 10**6, 10**6), {"step": 1}, "too many steps"),
        ("/d/{start}.csv", NUMBERS, {"tip": "now"}, "by the clock"),
        ("/d/{start}.csv", NUMBERS, {"tip": "2024-01-01"}, "not a whole number"),
    ],
)
def test_what_does_not_fit_the_history_is_refused_when_it_is_bound(
    template: str, geometry: Geometry, options: dict[str, Any], says: str
) -> None:
    source = PathSource(template, **options)
    with pytest.raises(Invalid, match=says):
        bind(source, context(geometry))


@pytest.mark.parametrize(
    ("template", "options", "says"),
    [
        ("/d/{start:%Y-%m}.csv", {}, "more than once"),
        ("/d/{start:%Y-%m-%d}.csv", {"step": "1h"}, "more than once"),
        ("/d/{end:%Y-%m}.csv", {}, "more than once"),
        ("/d/{start:%Y-%m-%dT%H:%M}.csv", {}, "colon"),
        ("/d/_{start:%d}.csv", {}, "ignores"),
    ],
)
def test_files_that_would_be_read_twice_or_not_at_all_are_refused(
    template: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(Invalid, match=says):
        paths(template, DAYS, **options)


def of(first: str, last: str | None, chunk: str) -> Geometry:
    return Geometry.of(first, last, chunk)


@pytest.mark.parametrize(
    ("template", "geometry", "step"),
    [
        ("/d/{start:%d}.csv", of("2024-01-01", "2024-03-01", "1d"), None),
        ("/d/{start:%m-%d}.csv", of("2023-01-01", "2024-06-01", "1d"), None),
        ("/d/{start:%m-%d}.csv", of("2023-01-01", None, "1d"), None),
        ("/d/{start:%j}.csv", of("2024-06-01", "2025-07-01", "1d"), None),
        ("/d/{start:%m-%d}-{end:%m-%d}.csv", of("2023-01-01", "2024-06-01", "1d"), None),
        ("/d/{start:%W}.csv", of("2022-01-03", "2024-06-01", "1w"), None),
        ("/d/{start:%y-%m-%d}.csv", of("1920-01-01", "2024-01-01", "1d"), None),
        ("/d/{start:%H}.csv", of("2024-01-01", "2024-01-03", "1h"), None),
        ("/d/{start:%m-%d-%H-%M}.csv", of("2023-01-01", "2024-06-01", "1m"), None),
        ("/d/{start:%Y-%m-%d-%M}.csv", of("2023-01-01", "2024-06-01", "1m"), None),
        ("/d/{start:%m-%d}.csv", of("2023-01-02", "2024-06-03", "1w"), "1d"),
        ("/d/{number}/{start:%H}.csv", of("2024-01-01", "2024-01-05", "2d"), "1h"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_files_that_come_again_anywhere_in_the_range_are_refused_when_it_is_bound(
    template: str, geometry: Geometry, step: str | None
) -> None:
    with pytest.raises(Invalid, match="more than once"):
        bind(PathSource(template, step=step), context(geometry))


@pytest.mark.parametrize(
    ("template", "geometry", "step"),
    [
        ("/d/{start:%d}.csv", of("2024-01-10", "2024-02-10", "1d"), None),
        ("/d/{start:%m-%d}.csv", of("2023-06-01", "2024-06-01", "1d"), None),
        ("/d/{start:%y%m%d}.csv", of("2024-01-01", None, "1d"), None),
        ("/d/{start:%Y%m%d}.csv", of("1500-01-01", None, "1d"), None),
        ("/d/{start:%Y%m%d}.csv", of("9998-01-01", None, "1d"), None),
        ("/d/{start:%G-%V}.csv", of("2000-01-03", None, "1w"), None),
        ("/d/{start:%Y-%j-%H}.csv", of("2024-01-01T05:30", None, "1h"), None),
        ("/d/{start:%Y%m%d}-{end:%H}.csv", of("2024-01-01", None, "1h"), None),
        ("/d/{number}.csv", of("2024-01-01", None, "1h"), None),
        ("/d/{number}/{start:%H}.csv", of("2024-01-01", None, "1d"), "1h"),
        ("/d/{start:%Y%m%d%H}.csv", of("2024-01-01", None, "7h"), None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_files_that_never_come_again_are_read(template: str, geometry: Geometry, step: str | None) -> None:
    source = bind(PathSource(template, step=step), context(geometry))
    assert isinstance(source, PathSource)
    start = geometry.number_of_inner(geometry.first)
    assert source.paths(geometry.chunk(start)) != source.paths(geometry.chunk(start + 1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"missing": "skip"}, "error or empty"),
        ({"format": "xml"}, "unknown format"),
        ({"step": "1mo"}, "no fixed length"),
        ({"step": timedelta(microseconds=1)}, "whole number of milliseconds"),
        ({"tip": "now-soon"}, "invalid duration"),
        ({"tip": 1.5}, "invalid tip"),
        ({"columns": "id lnog"}, "lnog"),
    ],
)
def test_wrong_settings_are_refused_when_a_source_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        PathSource("/d/{start}.csv", **options)


# ── tips ──


def test_files_of_times_go_up_to_now_or_as_long_before_as_said() -> None:
    before_ms = clock.now_ms()
    now = bind(PathSource("/d/{start:%d}.csv"), context(DAYS)).tip()
    delayed = bind(PathSource("/d/{start:%d}.csv", tip="now - 10m"), context(DAYS)).tip()
    after_ms = clock.now_ms()
    assert before_ms <= DAYS.value(now) // 1000 <= after_ms
    assert before_ms - 600_000 <= DAYS.value(delayed) // 1000 <= after_ms - 600_000


def test_files_of_numbers_do_not_tell_their_tip() -> None:
    assert bind(PathSource("/d/{start}.csv"), context(NUMBERS)).tip() is None
    assert bind(PathSource("/d/{start}.csv", tip="4000"), context(NUMBERS)).tip() == 4000


@pytest.mark.parametrize(
    "tip", [date(2024, 1, 5), "2024-01-05", lambda: "2024-01-05T00:00Z"], ids=["date", "text", "call"]
)
def test_a_tip_comes_as_the_histories_kind(tip: Any) -> None:
    assert bind(CallSource(lambda chunk: [], tip), context(DAYS)).tip() == datetime(2024, 1, 5, tzinfo=UTC)


# ── functions ──


def rows_of(chunk: Chunk) -> list[dict[str, Any]]:
    return [{"id": number} for number in range(int(chunk.start), int(chunk.end))]  # type: ignore[call-overload]


def four_thousand() -> int:
    return 4000


def test_a_function_is_a_source_and_its_errors_are_its_own() -> None:
    source = bind(to_source(rows_of), context(NUMBERS))
    assert source.tip() is None
    assert source.read(Chunk(0, 3, 5)) == [{"id": 3}, {"id": 4}]

    def breaks(chunk: Chunk) -> None:
        raise ZeroDivisionError(chunk.name)

    with pytest.raises(ZeroDivisionError, match=r"3\.\.5"):
        bind(to_source(breaks), context(NUMBERS)).read(Chunk(0, 3, 5))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no.such.module:rows", "no.such.module"),
        ("json:no_such_name", "no_such_name"),
        ("json:__doc__", "not a function"),
        ("antigravity_:x", "antigravity_"),
    ],
)
def test_a_function_that_cannot_be_imported_is_named(name: str, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        CallSource(name)
    with pytest.raises(Invalid, match=says):
        CallSource(rows_of, name)


# ── as they are kept ──


def kept(source: HistorySource) -> HistorySource:
    return source_from_dict(json.loads(json.dumps(source_as_dict(source))))


@pytest.mark.parametrize(
    "source",
    [
        PathSource("/d/{start}.csv"),
        PathSource(
            "/d/{start:%d}",
            step=timedelta(hours=1),
            format="jsonl",
            missing="empty",
            tip=datetime(2024, 1, 1),
            columns="id long",
        ),
        TableSource("events", "ts", tip="now-1h"),
        CallSource(rows_of, four_thousand),
        CallSource("json:loads", 5),
    ],
    ids=["path", "path-with-all", "table", "functions", "function-by-name"],
)
def test_settings_come_back_from_json(source: HistorySource) -> None:
    again = kept(source)
    assert type(again) is type(source)
    assert source_as_dict(again) == source_as_dict(source)


def test_a_kept_function_does_the_same_work() -> None:
    again = bind(kept(CallSource(rows_of, four_thousand)), context(NUMBERS))
    assert again.tip() == 4000
    assert again.read(Chunk(0, 1, 2)) == [{"id": 1}]


class OwnSource:
    def tip(self) -> int:
        return 7

    def read(self, chunk: Chunk) -> list[Any]:
        return []


@pytest.mark.parametrize(
    "source",
    [CallSource(lambda chunk: []), CallSource(rows_of, lambda: 1), OwnSource()],
    ids=["lambda", "tip-is-a-lambda", "own-class"],
)
def test_what_cannot_be_kept_says_how_to_go_on(source: HistorySource) -> None:
    with pytest.raises(Invalid, match="cannot be restored"):
        kept(source)


@pytest.mark.parametrize(
    "values", [None, [], {}, {"kind": "ftp"}, {"kind": "table", "table": "t"}, {"kind": "path", "url": "x"}], ids=str
)
def test_settings_that_are_none_are_corrupt(values: Any) -> None:
    with pytest.raises(Corrupt):
        source_from_dict(values)


def test_a_source_is_made_from_what_is_given() -> None:
    own = OwnSource()
    assert to_source(own) is own
    assert bind(own, context(NUMBERS)) is own
    assert isinstance(to_source("/d/{start}.csv"), PathSource)
    assert isinstance(to_source("json:loads"), CallSource)
    for given in (7, None, OwnSource, ["/d/{start}.csv"]):
        with pytest.raises(Invalid, match="unsupported source"):
            to_source(given)
