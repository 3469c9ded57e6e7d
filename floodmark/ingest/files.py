"""Files as a source: JSONL, CSV and Parquet, through Spark's own readers, made strict.

Spark's readers fill in nulls where a value does not fit or a name is misspelt. Here a value that does not fit fails
the load (FAILFAST), and a column that the table does not have, or a required one that is missing, is Invalid before any
row is staged. CSV is that of RFC 4180: quotes inside a quoted value are doubled, and a value may have line breaks;
empty text and no text are both null. Reading changes nothing, so a failure leaves nothing.

Files of this machine are read without Spark where that is enough, with the same meaning: small ones by small_files.py,
CSV whose rows are judged one by one by csv_rows.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from floodmark.errors import Invalid, NotFound
from floodmark.rows.convert import MISSING
from floodmark.rows.failures import DIGITS_ADVICE, INEXACT, spark_job
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.schema import nearest
from floodmark.rows.session import Sessions
from floodmark.rows.staging.incoming import LEFT_OUT_ADVICE, PARTS_MAX, Parts
from floodmark.storage import local_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

_BAD_RECORD = "_floodmark_bad_record"
FORMATS = {"parquet": "parquet", "csv": "csv", "json": "json", "jsonl": "json", "ndjson": "json"}
# A map whose keys are not text, in the JSON of a Spark type.
_OTHER_KEYS = re.compile(r'"keyType":(?!"string")')
# RFC 4180; Spark's own default is a backslash before a quote.
_CSV = {"header": "true", "escape": '"'}
COMPRESSIONS = ("gz", "zst", "bz2", "lz4", "snappy")
# What is a pattern for Spark.
_PATTERN = re.compile(r"[*?\[\]{}\\]")
# A second with more digits behind the point than microseconds, and not only zeros.
_NANOSECONDS = r":\d\d[.,]\d{6}\d*[1-9]"
_EXAMPLE_CHARACTERS_MAX = 100
# Spark has no file in one row that is larger.
UNFINISHED_BYTES_MAX = 2**31 - 1
# Files whose footers are compared; Spark itself reads the footer of one of them only.
FOOTERS_MAX = 32
FOOTERS_KNOWN_MAX = 100
# The advice for a small file that is refused as a whole.
CORRECT_ADVICE = "Correct the file and drop it again; nothing was loaded."


def format_of(paths: Sequence[str], given: str | None) -> str:
    """The one format of all these files: as given, or by the ends of their names."""
    if given is not None:
        if given not in FORMATS:
            raise Invalid("unknown format", format=given, advice=f"Use one of {', '.join(FORMATS)}.")
        return FORMATS[given]
    found = set()
    for path in paths:
        parts = [part for part in path.rstrip("/").lower().split(".") if part not in COMPRESSIONS]
        if parts[-1] not in FORMATS:
            raise Invalid("the name does not show the format", path=path, advice="Use --format.")
        found.add(FORMATS[parts[-1]])
    if len(found) != 1:
        raise Invalid(
            "these files have several formats", formats=",".join(sorted(found)), advice="Load them separately."
        )
    return found.pop()


def is_compressed(path: str) -> bool:
    return path.lower().endswith(tuple(f".{one}" for one in COMPRESSIONS))


def escaped(path: str) -> str:
    """The path of one file, for Spark: no character of it is part of a pattern."""
    return _PATTERN.sub(r"\\\g<0>", path)


def _one_here(path: str) -> str | None:
    """The plain path of a file on this machine; None for patterns and for other places."""
    name = local_path(path) if path.startswith("file:") else path
    # A pattern for Spark may be a file name here.
    return None if name is None or "://" in name or _PATTERN.search(name) else name


def unknown_column(name: str, known: Sequence[str], *, file: str | None = None, line: int | None = None) -> Invalid:
    return Invalid(
        "the files have a column that the table does not have",
        file=file,
        column=name,
        line=line,
        advice=nearest(name, list(known)),
    )


def missing_columns(names: Sequence[str], *, file: str | None = None, line: int | None = None) -> Invalid:
    return Invalid(
        "the files lack columns of the table",
        file=file,
        columns=",".join(names),
        line=line,
        advice="Add them to the header, with empty values if they are null.",
    )


# ── reading by Spark ──


def infer_schema(spark: SparkSession, paths: Sequence[str], file_format: str) -> StructType:
    """The columns of the files, as Spark understands them; for a new table."""
    if file_format == "csv":
        return _read(spark, paths, "csv", inferSchema="true", mode="FAILFAST", **_csv_options(spark, paths)).schema
    if file_format == "json":
        return _read(spark, paths, "json", mode="FAILFAST").schema
    return _read(spark, paths, "parquet").schema


def evolved_columns(spark: SparkSession, paths: Sequence[str], file_format: str, columns: StructType) -> StructType:
    """The table's columns, whole numbers as wide as the files need them, and the columns that only the files have."""
    found = {field.name: field for field in infer_schema(spark, paths, file_format).fields}
    wider = [
        field.name
        for field in columns.fields
        if field.dataType.typeName() == "integer" and field.name in found and _is_long(found[field.name])
    ]
    if file_format == "json" and wider:
        # For Spark every whole number in JSON is a long: only the values show more.
        wider = _beyond_int(spark, paths, type(columns)([found[name] for name in wider]))
    kept = [found[field.name] if field.name in wider else field for field in columns.fields]
    return type(columns)([*kept, *(field for name, field in found.items() if name not in columns.names)])


def _is_long(field: StructField) -> bool:
    return bool(field.dataType.typeName() == "long")


def _beyond_int(spark: SparkSession, paths: Sequence[str], columns: StructType) -> list[str]:
    """Which of these columns have a value that is no 32-bit number."""
    from pyspark.sql import functions as f

    frame = _typed(spark, paths, "json", columns)
    beyond = [f.max(~f.col(_quoted(name)).between(-(2**31), 2**31 - 1)).alias(name) for name in columns.names]
    with spark_job(spark, "these files cannot be read"):
        found = frame.agg(*beyond).collect()[0].asDict()
    return [name for name, is_beyond in found.items() if is_beyond]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def read_files(
    spark: SparkSession,
    paths: Sequence[str],
    file_format: str,
    columns: StructType,
    *,
    all_needed: bool = True,
    filled: Collection[str] = (),
    found: StructType | None = None,
    merged: Collection[str] = (),
) -> DataFrame:
    """The rows of the files with the table's columns and types; a value that does not fit is an error, never a null.

    all_needed=False: columns that a CSV file does not have are left out and not an error. `filled`: so are these
    columns always, if no file has them: the table fills them by itself. `found`: the columns that Spark would find in
    Parquet files, if they are known. `merged`: columns that every line of JSON must have, because its row replaces
    another.
    """
    if file_format == "parquet":
        return _read(spark, paths, "parquet", found)
    if file_format == "csv":
        options = _csv_options(spark, paths)
        header = _read(spark, paths, "csv", inferSchema="false", **options).columns
        needed = [name for name in columns.names if name not in filled or name in header]
        _check_names(header, needed, all_needed=all_needed)
        types = type(columns)([columns[name] for name in header])
        _check_times(spark, paths, "csv", types, enforceSchema="false", **options)
        return _typed(spark, paths, "csv", types, enforceSchema="false", **options)
    columns = _json_columns(spark, paths, columns, filled)
    if merged:
        _check_lines(spark, paths, [name for name in merged if name not in filled])
    return _typed(spark, paths, "json", columns)


def read_parts(
    spark: SparkSession, paths: Sequence[str], columns: StructType, *, filled: Collection[str] = ()
) -> Parts:
    """The rows of JSON files for a partial merge: lines that leave columns out are apart, by the columns they have."""
    return _by_columns(spark, paths, _json_columns(spark, paths, columns, filled))


def _json_columns(
    spark: SparkSession, paths: Sequence[str], columns: StructType, filled: Collection[str]
) -> StructType:
    """The table's columns that JSON files bring; Invalid if a name or a type of them cannot be read from JSON."""
    # Names only: every value as text, so the pass is cheap and no type is guessed.
    names = _read(spark, paths, "json", primitivesAsString="true", mode="FAILFAST").columns
    _check_names(names, columns.names, all_needed=False)
    columns = type(columns)([one for one in columns.fields if one.name not in filled or one.name in names])
    for name in names:
        # Spark would read such a key as text, and fail where it is used.
        if _OTHER_KEYS.search(columns[name].dataType.json()):
            raise Invalid("in JSON the keys of a map are text", column=name, advice="Load this column from Parquet.")
    _check_times(spark, paths, "json", columns)
    return columns


def unfinished_csv(sessions: Sessions, paths: Sequence[str]) -> str | None:
    """A CSV file whose last line has no end, if one exists: it may be cut there, and no other line shows it.

    Files of this machine that are named one by one are checked here; Spark checks all others, and reads them for it. A
    compressed file that is cut cannot be unpacked.
    """
    others = []
    for path in paths:
        if is_compressed(path):
            continue
        name = _one_here(path)
        if name is None:
            others.append(path)
        elif os.path.isfile(name) and os.path.getsize(name):
            with open(name, "rb") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) not in (b"\n", b"\r"):
                    return path
    return _unfinished_elsewhere(sessions.get(), others) if others else None


def _unfinished_elsewhere(spark: SparkSession, paths: Sequence[str]) -> str | None:
    compressed = f"lower(path) rlike '[.]({'|'.join(COMPRESSIONS)})$'"
    try:
        files = _read(spark, paths, "binaryFile").where(f"length between 1 and {UNFINISHED_BYTES_MAX}")
        with spark_job(spark, "these files cannot be read"):
            cut = files.where(f"not {compressed} and hex(substring(content, -1, 1)) not in ('0A', '0D')").select("path")
            found = cut.limit(1).collect()
    except NotFound:
        return None  # the reading itself reports which
    return str(found[0][0]) if found else None


def _json_lines(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """The lines of JSON files but blank ones, and the names that each has: `value` and `names`, ascending."""
    from pyspark.sql import functions as f

    lines = _read(spark, paths, "text").where(f.trim("value") != "")
    lines = lines.withColumn("names", f.array_sort(f.array_distinct(f.json_object_keys("value"))))
    with spark_job(spark, "these files cannot be read"):
        other = lines.where(f.col("names").isNull()).limit(1).count()
    if other:
        raise Invalid(
            "a line is not one JSON object",
            path=",".join(paths),
            advice="Rows that are merged are read line by line: put one object in each line.",
        )
    return lines


def _check_lines(spark: SparkSession, paths: Sequence[str], needed: Sequence[str]) -> None:
    """Refuse lines that leave out one of these columns: for Spark's reader they would be null."""
    from pyspark.sql import functions as f

    lacking = [f.sum(f.when(f.array_contains("names", name), 0).otherwise(1)) for name in needed]
    with spark_job(spark, "these files cannot be read"):
        counts = _json_lines(spark, paths).agg(*lacking).collect()[0]
    Misfits(
        Problem(name, MISSING, int(count), LEFT_OUT_ADVICE) for name, count in zip(needed, counts, strict=True) if count
    ).raise_invalid()


def _by_columns(spark: SparkSession, paths: Sequence[str], columns: StructType) -> Parts:
    """The lines of JSON files by the columns that they have, a frame for each set of them."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructField

    lines = _json_lines(spark, paths)
    with spark_job(spark, "these files cannot be read"):
        sets = [tuple(row["names"]) for row in lines.select("names").distinct().limit(PARTS_MAX + 1).collect()]
    if len(sets) > PARTS_MAX:
        raise Invalid(
            "the rows have too many different sets of columns",
            most=PARTS_MAX,
            advice="Load the files separately, or give every row the same columns.",
        )
    frames = []
    for names in sorted(sets):
        shape = type(columns)([StructField(name, _widened(columns[name].dataType), True) for name in names])
        parsed = f.from_json("value", shape, {"mode": "FAILFAST"}).alias("row")
        same = lines.where(f.col("names") == f.array(*(f.lit(name) for name in names)))
        frames.append(same.select(parsed).select("row.*").select(*(_exact(columns[name]) for name in names)))
    return Parts(tuple(frames))


def explain(spark: SparkSession, paths: Sequence[str], file_format: str, columns: StructType) -> Invalid | None:
    """After a load that failed: which records do not fit the table's types, how many, and one of them."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField

    if file_format == "parquet":
        return None
    options, names = {}, columns.names
    if file_format == "csv":
        options = _csv_options(spark, paths)
        names = _read(spark, paths, "csv", inferSchema="false", **options).columns
        options["enforceSchema"] = "false"
    lenient = [StructField(name, columns[name].dataType, True) for name in names]
    marked = type(columns)([*lenient, StructField(_BAD_RECORD, StringType(), True)])
    options |= {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD_RECORD}
    # Spark answers questions about the text of a bad record only from rows that it has kept.
    frame = _read(spark, paths, file_format, marked, **options).cache()
    try:
        bad = frame.where(f.col(_BAD_RECORD).isNotNull())
        with spark_job(spark, "these files cannot be read"):
            count, example = bad.count(), bad.first()
    finally:
        frame.unpersist()
    if example is None:
        return None
    text = example[_BAD_RECORD]
    as_text = ", ".join(f"`{name}` string" for name in names)
    parse = f.from_csv if file_format == "csv" else f.from_json
    with spark_job(spark, "these files cannot be read"):
        raw = spark.range(1).select(parse(f.lit(text), as_text, {"escape": '"'}).alias("raw")).collect()[0]["raw"]
    lost = [name for name in names if example[name] is None and raw is not None and raw[name] is not None]
    file, line = _place_of(paths, text)
    return Invalid(
        "records do not fit the table's types",
        file=file,
        line=line,
        column=",".join(lost) or None,
        count=count,
        example=repr(text)[:200],
        advice="Correct the file; nothing was loaded.",
    )


def _place_of(paths: Sequence[str], record: str) -> tuple[str | None, int | None]:
    """The file and line of a record, of plain files on this machine; None where that is unknown."""
    for path in map(_spark_path, paths):
        if not os.path.isfile(path) or is_compressed(path):
            continue
        with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.rstrip("\r\n") == record.rstrip("\r\n"):
                    return path, number
    return None, None


def _csv_options(spark: SparkSession, paths: Sequence[str]) -> dict[str, str]:
    """How to read CSV. A value with a line break leaves a line with an odd number of quotes; only then is a file read
    as a whole, because then no two tasks can share it."""
    from pyspark.sql import functions as f

    quotes = f.length("value") - f.length(f.replace("value", f.lit('"'), f.lit("")))
    with spark_job(spark, "these files cannot be read"):
        broken = _read(spark, paths, "text").where(quotes % 2 == 1).limit(1).count()
    return {**_CSV, "multiLine": "true" if broken else "false"}


def _typed(
    spark: SparkSession, paths: Sequence[str], file_format: str, columns: StructType, **options: str
) -> DataFrame:
    from pyspark.sql.types import StructField

    # A reader's schema lists what may exist; what must exist is checked, and counted, while staging.
    lenient = type(columns)([StructField(field.name, _widened(field.dataType), True) for field in columns.fields])
    frame = _read(spark, paths, file_format, lenient, mode="FAILFAST", **options)
    return frame.select(*(_exact(field) for field in columns.fields))


# ── digits that a column has no room for ──


def _widened(kind: DataType) -> DataType:
    """The type with as many digits after the point of decimals as fit: Spark's readers round to the type that they get.

    A decimal of 38 digits has no wider type: there Spark rounds.
    """
    from pyspark.sql.types import ArrayType, DecimalType, MapType, StructField, StructType

    if isinstance(kind, DecimalType):
        return DecimalType(38, 38 - (kind.precision - kind.scale))
    if isinstance(kind, ArrayType):
        return ArrayType(_widened(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _widened(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, StructType):
        fields = kind.fields
        return StructType([StructField(one.name, _widened(one.dataType), one.nullable, one.metadata) for one in fields])
    return kind


def _exact(field: StructField) -> Column:
    """A column as the table has it; a value that would be rounded fails the load."""
    from pyspark.sql import functions as f

    found, wide = f.col(_quoted(field.name)), _widened(field.dataType)
    if wide == field.dataType:
        return found
    narrow = found.cast(field.dataType)
    again, text = narrow.cast(wide), f.to_json(f.struct(found.alias(field.name)))
    # Maps cannot be compared, but as text.
    same = (
        f.to_json(f.struct(again.alias(field.name))) == text
        if "map" in wide.simpleString()
        else found.eqNullSafe(again)
    )
    failure = f.raise_error(f.concat(f.lit(f"{INEXACT}{field.name}: "), f.substring(text, 1, _EXAMPLE_CHARACTERS_MAX)))
    return f.when(same, narrow).otherwise(failure).alias(field.name)


def _check_times(
    spark: SparkSession, paths: Sequence[str], file_format: str, columns: StructType, **options: str
) -> None:
    """Refuse times with more digits than microseconds, which Spark's readers cut; not those inside a list or struct."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField

    times = [one.name for one in columns.fields if one.dataType.typeName() in ("timestamp", "timestamp_ntz")]
    if not times:
        return
    with spark_job(spark, "these files cannot be read"):
        if not _read(spark, paths, "text").where(f.col("value").rlike(_NANOSECONDS)).limit(1).count():
            return
        kept = columns.names if file_format == "csv" else times
        texts = type(columns)([StructField(name, StringType(), True) for name in kept])
        frame = _read(spark, paths, file_format, texts, **options)
        cut = [f.when(f.col(_quoted(name)).rlike(_NANOSECONDS), f.col(_quoted(name))) for name in times]
        counts = frame.agg(*(f.count(one) for one in cut), *(f.max(one) for one in cut)).collect()[0]
    Misfits(
        Problem(name, f"a time has digits beyond microseconds, for example {example}", int(count), DIGITS_ADVICE)
        for name, count, example in zip(times, counts[: len(times)], counts[len(times) :], strict=True)
        if count
    ).raise_invalid()


def _check_names(found: Sequence[str], known: Sequence[str], *, all_needed: bool) -> None:
    for name in found:
        if name not in known:
            raise unknown_column(name, known)
    missing = [name for name in known if name not in found]
    if all_needed and missing:
        raise missing_columns(missing)


def _read(
    spark: SparkSession, paths: Sequence[str], file_format: str, schema: StructType | None = None, **options: str
) -> DataFrame:
    _check_seen(paths)
    reader = spark.read.format(file_format).options(**options)
    if schema is not None:
        reader = reader.schema(schema)
    try:
        with spark_job(spark, "these files cannot be read"):
            return reader.load([_spark_path(path) for path in paths])
    except Invalid as error:
        if "PATH_NOT_FOUND" in str(error):
            raise NotFound("there is no such file", path=",".join(paths)) from error
        raise


def _check_seen(paths: Sequence[str]) -> None:
    """Spark silently ignores files of such names, also if they are named one by one."""
    for path in paths:
        name = path.rpartition("/")[2]
        named_file = os.path.isfile(_spark_path(path)) or ("://" in path and "." in name[1:])
        if name.startswith((".", "_")) and named_file:
            raise Invalid(
                "Spark does not read a file whose name begins with _ or a dot",
                path=path,
                advice="Give it another name. Nothing was loaded.",
            )


def _spark_path(path: str) -> str:
    """A path as Spark takes it: ours as a plain path, so that no character in it is an escape; others as they are."""
    return local_path(path) or path if path.startswith("file://") else path


# ── footers of Parquet files ──


class Footers:
    """Columns of Parquet files as Spark understands them, by their footers: Spark runs a job to read one footer.

    Reading a footer here takes no time: files with the schema and metadata of files that Spark has read have the same
    columns. Only files of this machine that are named one by one; Spark reads all others.
    """

    def __init__(self) -> None:
        self._known: dict[str, StructType] = {}

    def columns(self, paths: Sequence[str]) -> tuple[str | None, StructType | None]:
        """What these files have in common, None if that is unknown; and their columns, if they are known."""
        if len(paths) > FOOTERS_MAX:
            return None, None
        found = {_footer(path) for path in paths}
        common = found.pop() if len(found) == 1 else None
        return common, self._known.get(common) if common is not None else None

    def learn(self, common: str | None, columns: StructType) -> None:
        if common is not None and len(self._known) < FOOTERS_KNOWN_MAX:
            self._known[common] = columns


def _footer(path: str) -> str | None:
    name = _one_here(path)
    if name is None or not os.path.isfile(name):
        return None
    try:
        footer = pq.read_metadata(name)
    except (OSError, pa.ArrowException):
        return None
    # The first line of a schema's text is the address of the object.
    _, _, schema = str(footer.schema).partition("\n")
    return f"{schema}\n{sorted((footer.metadata or {}).items())!r}"
