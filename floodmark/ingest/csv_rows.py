"""CSV read in this process: that of RFC 4180 with a header; empty text is null, and a time without a zone is UTC where
the table has a zone.

`read_text` reads a small file as a whole, all of it or nothing. `CsvFiles` judges rows one by one: a load that failed
asks it for the first mistakes of each kind, and a load that sets bad rows aside takes the others as a stream. Its
memory follows a chunk of rows, not the file (I14).

Bad rows go into a folder beside the file that they came from, with its name and header, so that they can be corrected
and loaded; a second file has the reasons, a line each. Both are durable before the rows that fit are published (I4).
Crash before that: the files exist and nothing was loaded; the same load writes the same files under the same names.
"""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import zstandard
from pyarrow import types

from floodmark.errors import Invalid, Unavailable
from floodmark.failpoints import hit
from floodmark.ingest.files import CORRECT_ADVICE, missing_columns, unknown_column
from floodmark.json_form import Json
from floodmark.rows.convert import NULL_IN_REQUIRED, Column
from floodmark.storage import local_path

# What one row may be. Python's reader and Arrow's have lower bounds of their own (128 KiB, about 1 MiB).
CSV_ROW_BYTES_MAX = 16 * 1024 * 1024
CHUNK_ROWS = 10_000
# Of each kind so many are listed; all are counted.
MISTAKES_SHOWN = 3
ASIDE_FOLDER = "_bad-rows"
_VALUE_CHARACTERS_MAX = 60
# Arrow's message for a row with another number of values.
_ARROW_ROW = re.compile(r"Row #(\d+): (.*)", re.DOTALL)
# A time that has a zone ends like this.
_ZONE = r"([Zz]|[+-]\d{2}(:?\d{2})?)$"
_NOT_TEXT = "the value is not UTF-8"
# Compressions that are read here, by the ends of names.
_ENDINGS = (".gz", ".bz2", ".zst")


# ── reading ──


class CsvRow(NamedTuple):
    """A row, and the line that it begins in."""

    line: int
    values: list[str]


class CsvRecords(Iterator[CsvRow]):
    """The rows of CSV text as Python reads them: slow, for headers, for what is wrong, and for rows one by one.

    `line` is where the next row begins; after a csv.Error it is where the row begins that cannot be read.
    """

    def __init__(self, text: IO[str], *, strict: bool = False) -> None:
        # For the whole process, and always the same: nothing else reads CSV in this way.
        csv.field_size_limit(CSV_ROW_BYTES_MAX)
        self._reader = csv.reader(text, strict=strict)
        self.line = 1

    def __next__(self) -> CsvRow:
        values = next(self._reader)
        line, self.line = self.line, self._reader.line_num + 1
        return CsvRow(line, values)

    def header(self) -> list[str]:
        return next(self, CsvRow(1, [])).values


def check_header(
    names: list[str], columns: Sequence[Column], optional: Collection[str], *, file: str | None = None, advice: str = ""
) -> list[Column]:
    """The table's columns in the order of a header; Invalid if the file cannot hold their rows."""
    known = {column.name: column for column in columns}
    for name in names:
        if names.count(name) > 1:
            raise Invalid("the header has a column twice", file=file, column=name, line=1, advice=advice)
        if name not in known:
            raise unknown_column(name, list(known), file=file, line=1)
        if types.is_nested(known[name].field.type):
            kind = known[name].field.type
            raise Invalid("CSV cannot hold this column", file=file, column=name, type=kind, advice="Use JSONL.")
    missing = [name for name in known if name not in names and name not in optional]
    if missing:
        raise missing_columns(missing, file=file, line=1)
    return [known[name] for name in names]


def cast_texts(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Texts of CSV as values of a column; ArrowInvalid if one does not fit."""
    if types.is_boolean(kind):
        lower = pc.utf8_lower(texts)
        if pc.all(pc.is_in(lower, pa.array(["true", "false", None])), min_count=0).as_py() is False:
            raise pa.ArrowInvalid("neither true nor false")
        return lower.cast(kind)
    if types.is_timestamp(kind) and kind.tz is not None:
        # A date has a minus too: without a time of day there is no zone.
        zoned = pc.and_(pc.match_substring(texts, ":"), pc.match_substring_regex(texts, _ZONE))
        nothing = pa.scalar(None, pa.string())
        plain = pc.if_else(zoned, nothing, texts).cast(pa.timestamp(kind.unit))
        return pc.if_else(zoned, pc.if_else(zoned, texts, nothing).cast(kind), pc.assume_timezone(plain, kind.tz))
    found = texts.cast(kind)
    if types.is_floating(kind):
        endless = pc.and_(pc.is_inf(found), pc.invert(pc.match_substring(pc.utf8_lower(texts), "inf")))
        if pc.any(endless, min_count=0).as_py():
            raise pa.ArrowInvalid("too large a number")
    return found


def bad_places(texts: pa.ChunkedArray, kind: pa.DataType, start: int = 0) -> Iterator[int]:
    """The places of values that do not fit, ascending, by halving: quick where few of them are bad."""
    try:
        cast_texts(texts, kind)
    except pa.ArrowInvalid:
        if len(texts) == 1:
            yield start
            return
        half = len(texts) // 2
        yield from bad_places(texts[:half], kind, start)
        yield from bad_places(texts[half:], kind, start + half)


# ── one text, all of it or nothing ──


def read_text(text: bytes, columns: Sequence[Column], filled: Collection[str]) -> pa.Table:
    """The rows of a whole file, by Arrow's reader; Invalid with the line of the first that does not fit."""
    header = check_header(_header_of(text), columns, filled, advice=CORRECT_ADVICE)
    names = [column.name for column in header]
    table = _texts(text, names)
    return pa.table([_typed(text, table.column(column.name), column) for column in header], names=names)


def _header_of(text: bytes) -> list[str]:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise Invalid("the file is not UTF-8", line=line, advice=CORRECT_ADVICE) from error
    try:
        return _records(text).header()
    except csv.Error as error:
        raise Invalid("the header cannot be read as CSV", line=1, cause=error, advice=CORRECT_ADVICE) from error


def _records(text: bytes, *, strict: bool = False) -> CsvRecords:
    return CsvRecords(io.TextIOWrapper(io.BytesIO(text), "utf-8-sig", newline=""), strict=strict)


def _line_of(text: bytes, number: int) -> int | None:
    """The line in which the row of this number begins; the header is row 0. Empty lines are no rows.

    None if Python cannot read up to there: the error of Arrow's reader then has no line.
    """
    records = _records(text)
    try:
        for line, values in records:
            if values and number == 0:
                return line
            number -= bool(values)
    except csv.Error:
        return None
    return records.line


def _check_quotes(text: bytes) -> None:
    """A quote that is never closed makes one value of the rest of the file, and readers accept it silently."""
    if text.count(b'"') % 2 == 0:
        return
    records = _records(text, strict=True)
    try:
        for _ in records:
            pass
    except csv.Error as error:
        if "unexpected end" in str(error):
            problem = "a quote is never closed: the rest of the file would be one value"
            raise Invalid(problem, line=records.line, advice=CORRECT_ADVICE) from error


def _texts(text: bytes, header: Sequence[str]) -> pa.Table:
    """All values as text; empty ones are null."""
    _check_quotes(text)
    try:
        return pa_csv.read_csv(
            io.BytesIO(text),
            read_options=pa_csv.ReadOptions(
                use_threads=False,
                column_names=list(header),
                skip_rows_after_names=1,
                # A row may go on in the next block, and not in the one after that.
                block_size=CSV_ROW_BYTES_MAX,
            ),
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types={name: pa.string() for name in header},
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        found = _ARROW_ROW.search(str(error))
        raise Invalid(
            "a row has more or fewer values than the header" if found else "a row is too long, or is not CSV",
            line=None if found is None else _line_of(text, int(found[1]) - 1),
            problem=(str(error) if found is None else found[2])[:200],
            advice=CORRECT_ADVICE,
        ) from error


def _typed(text: bytes, texts: pa.ChunkedArray, column: Column) -> pa.ChunkedArray:
    try:
        return cast_texts(texts, column.field.type)
    except pa.ArrowInvalid as error:
        row = next(bad_places(texts, column.field.type))
        raise Invalid(
            f"a value is not the table's {column.field.type}",
            column=column.name,
            line=_line_of(text, row + 1),
            value=repr(texts[row].as_py())[:_VALUE_CHARACTERS_MAX],
            advice=CORRECT_ADVICE,
        ) from error


# ── files, row by row ──


@dataclass(frozen=True)
class Mistake:
    """What is wrong with one row: where it begins, and the column and value unless it is the row as a whole."""

    file: str
    line: int
    problem: str
    column: str | None = None
    value: str | None = None

    @property
    def kind(self) -> tuple[str | None, str]:
        return self.column, self.problem

    def __str__(self) -> str:
        place = f"line {self.line}" + ("" if self.column is None else f", column {self.column}")
        value = "" if self.value is None else f" ({self.value})"
        return f"{place}: {self.problem}{value}"


class BadRecords(Invalid):
    """Rows of CSV files that do not fit; `mistakes` are the first of each kind, `rows` says how many rows."""

    def __init__(self, found: Mistakes) -> None:
        self.mistakes = tuple(found.first)
        self.rows = found.rows
        first = self.mistakes[0]
        listed = "; ".join(str(one) for one in self.mistakes)
        kinds = ", ".join(dict.fromkeys(one.column for one in self.mistakes if one.column is not None))
        super().__init__(
            f"rows do not fit the table: {listed}",
            file=first.file,
            line=first.line,
            column=kinds or None,
            value=first.value,
            count=found.rows,
            advice="Nothing was loaded. Correct the file, or set these rows aside: --bad-rows set-aside.",
        )

    @property
    def kind(self) -> str:
        return Invalid.__name__  # the name that callers know

    def as_dict(self) -> dict[str, Json]:
        return {**super().as_dict(), "mistakes": [asdict(one) for one in self.mistakes], "rows": self.rows}


@dataclass
class Mistakes:
    """Mistakes so far: the first of each kind, and how many rows have one."""

    first: list[Mistake] = field(default_factory=list)
    rows: int = 0
    _counts: dict[tuple[str | None, str], int] = field(default_factory=dict)

    def add(self, mistake: Mistake) -> None:
        self.rows += 1
        seen = self._counts[mistake.kind] = self._counts.get(mistake.kind, 0) + 1
        if seen <= MISTAKES_SHOWN:
            self.first.append(mistake)


class CsvFiles:
    """CSV files of a table's rows. `columns` are the table's; with `partial` a file may leave some out."""

    def __init__(
        self, paths: Sequence[str], columns: Sequence[Column], filled: Collection[str] = (), *, partial: bool = False
    ) -> None:
        self._paths = paths
        self._columns = {column.name: column for column in columns}
        self._optional = set(self._columns) if partial else set(filled)
        self.mistakes = Mistakes()
        # The files of rows that were set aside.
        self.set_aside: list[str] = []
        # Those of them that this load made: the others belong to an earlier load that set the same rows aside.
        self._made: list[str] = []

    @staticmethod
    def local_files(paths: Sequence[str]) -> list[str] | None:
        """The files that a path names, if all are on this machine and in a compression that we read; else None."""
        found: list[str] = []
        for path in paths:
            local = local_path(path) if path.startswith("file://") else None if "://" in path else path
            if local is None:
                return None
            matching = sorted(glob.glob(local)) if glob.has_magic(local) and not os.path.exists(local) else [local]
            for one in matching:
                inside = sorted(str(file) for file in Path(one).iterdir()) if os.path.isdir(one) else [one]
                found += [file for file in inside if not os.path.basename(file).startswith((".", "_"))]
        packed = [os.path.splitext(file)[1] in (".lz4", ".snappy") for file in found]
        return None if any(packed) or not all(map(os.path.isfile, found)) else found

    def find_mistakes(self) -> BadRecords | None:
        """Read all of it; returns what is wrong with it, or None."""
        for path in self._paths:
            for _, bad in self._judged(path):
                for mistake, _ in bad:
                    self.mistakes.add(mistake)
        return BadRecords(self.mistakes) if self.mistakes.rows else None

    def good_rows(self) -> pa.RecordBatchReader:
        """The rows that fit; the others are set aside on the way, whole and durable when the last row was read."""
        first = next(iter(self._paths))
        with _opened(first) as text:
            header = self._header(first, CsvRecords(text))
        schema = pa.schema([pa.field(column.name, column.field.type) for column in header])
        return pa.RecordBatchReader.from_batches(schema, self._good(schema))

    def forget_set_aside(self) -> None:
        """The load failed after all: delete the files of this load's bad rows."""
        for name in self._made:
            for path in (name, _reasons(name)):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            with suppress(OSError):  # other files are in it
                os.rmdir(os.path.dirname(name))
        self.set_aside, self._made = [], []

    def _good(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for path in self._paths:
            bad = _BadRows(path)
            try:
                for good, wrong in self._judged(path, schema):
                    for mistake, values in wrong:
                        self.mistakes.add(mistake)
                        bad.add(mistake, values)
                    yield from good.to_batches()
                name, is_new = bad.finish()
                self.set_aside += [name] if name else []
                self._made += [name] if is_new else []
            finally:
                bad.close()
        # Crash here: bad rows are in their files, and nothing is loaded. The same load writes them again.
        hit("load.set_aside")

    def _judged(
        self, path: str, schema: pa.Schema | None = None
    ) -> Iterator[tuple[pa.Table, list[tuple[Mistake, list[str]]]]]:
        """Chunk by chunk the rows that fit, and the others with what is wrong. The first chunk has the header only."""
        with _opened(path) as text:
            records = CsvRecords(text, strict=True)
            header = self._header(path, records)
            names = [column.name for column in header]
            if schema is not None and sorted(names) != sorted(schema.names):
                raise Invalid("the files have different columns", file=path, advice="Load them separately.")
            rows = _rows(path, records)
            while chunk := list(islice(rows, CHUNK_ROWS)):
                good, bad = _judge(path, header, chunk)
                yield good if schema is None else good.select(schema.names), bad

    def _header(self, path: str, records: CsvRecords) -> list[Column]:
        return check_header(records.header(), list(self._columns.values()), self._optional, file=path)


@contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    try:
        with _open_bytes(path) as raw:
            # Bytes that are not text stay as they are: the error names their row, and it is set aside unchanged.
            yield io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="")
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise Unavailable("a file cannot be read", path=path, cause=error) from error


def _open_bytes(path: str) -> IO[bytes] | gzip.GzipFile | bz2.BZ2File:
    match os.path.splitext(path)[1]:
        case ".gz":
            return gzip.open(path, "rb")
        case ".bz2":
            return bz2.open(path, "rb")
        case ".zst":
            unpacked: IO[bytes] = zstandard.open(path, "rb")
            return unpacked
    return open(path, "rb")


def _rows(path: str, records: CsvRecords) -> Iterator[CsvRow]:
    """The rows behind the header. Empty lines are no rows."""
    try:
        yield from (row for row in records if row.values)
    except csv.Error as error:
        # Also a quote that is never closed: it would make one value of the rest of the file.
        raise Invalid(
            "a row cannot be read as CSV",
            file=path,
            line=records.line,
            cause=error,
            advice="Nothing was loaded. Correct that row: often a quote is not closed.",
        ) from error


def _judge(path: str, header: list[Column], rows: list[CsvRow]) -> tuple[pa.Table, list[tuple[Mistake, list[str]]]]:
    found: dict[int, Mistake] = {}
    for number, row in enumerate(rows):
        if len(row.values) != len(header):
            problem = f"the row has another number of values than the header has columns ({len(header)})"
            found[number] = Mistake(path, row.line, problem, value=f"{len(row.values)} values")
    for place, column in enumerate(header):
        whole = [number for number in range(len(rows)) if number not in found]
        texts = [rows[number].values[place] or None for number in whole]
        for at, problem in _wrong(texts, column):
            value = rows[whole[at]].values[place]
            shown = repr(value.encode(errors="surrogateescape") if problem == _NOT_TEXT else value)
            shown = shown if len(shown) <= _VALUE_CHARACTERS_MAX else shown[:_VALUE_CHARACTERS_MAX] + "…"
            found[whole[at]] = Mistake(path, rows[whole[at]].line, problem, column.name, shown)
    good = [row.values for number, row in enumerate(rows) if number not in found]
    arrays = []
    for place, column in enumerate(header):
        texts_array = pa.chunked_array([pa.array([values[place] or None for values in good], pa.string())])
        arrays.append(cast_texts(texts_array, column.field.type))
    table = pa.table(arrays, names=[column.name for column in header])
    return table, [(found[number], rows[number].values) for number in sorted(found)]


def _wrong(texts: list[str | None], column: Column) -> Iterator[tuple[int, str]]:
    """The places of values that do not fit the column, and why."""
    clean: list[str | None] = []
    for at, text in enumerate(texts):
        if text is None and column.required:
            yield at, NULL_IN_REQUIRED
        if text is not None and not text.isascii() and _has_surrogates(text):
            yield at, _NOT_TEXT
            text = None
        clean.append(text)
    for at in bad_places(pa.chunked_array([pa.array(clean, pa.string())]), column.field.type):
        yield at, f"the value is not the table's {column.field.type}"


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# ── setting aside ──


class _BadRows:
    """The file of one file's bad rows, and that of the reasons; created with the first bad row."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: list[IO[str]] = []
        self._names: list[str] = []

    def add(self, mistake: Mistake, values: Iterable[str]) -> None:
        if not self._files:
            self._begin()
        csv.writer(self._files[0], lineterminator="\n").writerow(values)
        self._files[1].write(json.dumps(asdict(mistake), ensure_ascii=False) + "\n")

    def _begin(self) -> None:
        base = _aside_name(self._path, 1)
        self._names = [f"{base}.{os.getpid()}.tmp", f"{_reasons(base)}.{os.getpid()}.tmp"]
        errors = ("surrogateescape", "backslashreplace")
        try:
            os.makedirs(os.path.dirname(base), exist_ok=True)
            for name, on_error in zip(self._names, errors, strict=True):
                self._files.append(open(name, "w", encoding="utf-8", errors=on_error, newline=""))  # noqa: SIM115 - `close` does
        except OSError as error:
            raise Unavailable("bad rows cannot be set aside", path=base, cause=error) from error
        with _opened(self._path) as text:
            csv.writer(self._files[0], lineterminator="\n").writerow(CsvRecords(text).header())

    def finish(self) -> tuple[str, bool]:
        """Make both files durable under names of their own: earlier ones with other rows stay. The name, if any, and
        whether it is a new one."""
        if not self._files:
            return "", False
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        number = 1
        while (name := Path(_aside_name(self._path, number))).exists() and not _same(str(name), self._names[0]):
            number += 1
        is_new = not name.exists()
        os.replace(self._names[1], _reasons(str(name)))
        os.replace(self._names[0], name)
        for place in (name.parent, name.parent.parent):
            folder = os.open(place, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return str(name), is_new

    def close(self) -> None:
        for file in self._files:
            file.close()
        for name in self._names:
            with suppress(FileNotFoundError):
                os.unlink(name)
        if self._names:
            with suppress(OSError):  # not empty: the rows are in it
                os.rmdir(os.path.dirname(self._names[0]))


def _same(one: str, other: str) -> bool:
    return Path(one).read_bytes() == Path(other).read_bytes()


def _aside_name(path: str, number: int) -> str:
    base, ending = os.path.splitext(path)
    base = os.path.splitext(base)[0] if ending in _ENDINGS else base
    # A folder whose name begins with _ is skipped when the folder around it is loaded again, here and by Spark; a file
    # of such a name could not be loaded at all, once its rows are corrected.
    folder, name = os.path.split(base)
    return os.path.join(folder, ASIDE_FOLDER, f"{name}{'' if number == 1 else f'-{number}'}.csv")


def _reasons(name: str) -> str:
    return f"{name.removesuffix('.csv')}.reasons.jsonl"
