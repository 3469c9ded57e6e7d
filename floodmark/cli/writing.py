"""The commands that write rows: `load` puts the rows of files into a table, in one commit; `update` and `delete` are
copy-on-write.

`update` and `delete` show which rows they would change; `--apply` does it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floodmark.cli.context import IfVersion, OnBranch
from floodmark.cli.progress import staging_progress
from floodmark.errors import CommitUnknown, FloodmarkError, Invalid
from floodmark.json_form import Json
from floodmark.model import MAIN, Commit

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema

    from floodmark.ingest.csv_rows import CsvFiles
    from floodmark.lake import Lake
    from floodmark.rows.frames import DataFrame, StructType
    from floodmark.write.transaction import Transaction


# ── load ──


# What becomes of rows that do not fit.
REFUSE, SET_ASIDE = "refuse", "set-aside"


def load(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    files: Annotated[list[str], typer.Argument(help="JSONL, CSV or Parquet; any path that Spark can read.")],
    mode: Annotated[str, typer.Option(help="append, merge (upsert by the table's key) or overwrite.")] = "append",
    batch: Annotated[str | None, typer.Option(help="Batch id: a load with the same id is a no-op.")] = None,
    file_format: Annotated[str | None, typer.Option("--format", help="jsonl, csv or parquet.")] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the table if it does not exist.")] = False,
    schema: Annotated[str | None, typer.Option(help='With --create: columns, like "id long, ts timestamp".')] = None,
    key: Annotated[list[str] | None, typer.Option(help="With --create: a key column; may be repeated.")] = None,
    partition: Annotated[list[str] | None, typer.Option(help="With --create: like day(ts); may be repeated.")] = None,
    where: Annotated[str | None, typer.Option(help="With --mode overwrite: replace only rows that match.")] = None,
    last_by: Annotated[
        str | None, typer.Option(help="With --mode merge: of rows with the same key, use the highest in this column.")
    ] = None,
    evolve: Annotated[
        bool, typer.Option("--evolve", help="Add new columns of the files, and widen integer types.")
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="With --mode merge: update only the columns that the files have.")
    ] = False,
    bad_rows: Annotated[
        str, typer.Option(help="CSV rows that do not fit: refuse (the whole load) or set-aside (in a file).")
    ] = REFUSE,
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
) -> None:
    """Load files into a table."""
    from floodmark.ingest.files import format_of

    _check_options(mode, create, schema, key, partition, where, last_by, partial)
    found_format = format_of(files, file_format)
    _check_bad_rows(bad_rows, found_format, evolve=evolve)
    started = time.monotonic()
    with context.obj.open(read_only=False) as lake:
        new = create and table.lower() not in {head.table.lower() for head in lake.heads(branch)}
        load = _Load(lake, table, branch, files, found_format, mode, partial, evolve and not new, new, schema)
        note = message or f"{mode} {len(files)} file(s)"
        with load.explained(), staging_progress(context.obj.output) as progress:
            rows = load.rows(set_aside=bad_rows == SET_ASIDE)
            choices: dict[str, Any] = {"where": where, "last_by": last_by, "evolve": load.evolve, "progress": progress}
            if partial:
                choices["partial"] = True
            if new:
                # In one version: rows that do not fit leave no empty table behind.
                with lake.transaction(note, batch=batch, batch_table=table, branch=branch, if_version=if_version) as tx:
                    tx.create_table(table, load.shape, key=key or [], partition=partition or [])
                    _write(tx, mode, table, rows, **choices)
                commit = tx.commit
            else:
                choices |= {"message": note, "branch": branch, "if_version": if_version}
                commit = _write(lake, mode, table, rows, **choices, batch=batch)
    _tell(context, table, batch, commit, time.monotonic() - started, load.aside)


@dataclass
class _Load:
    """The rows of the files, and what is said of them if they do not fit. `aside`: those that were set aside."""

    lake: Lake
    table: str
    branch: str
    files: list[str]
    file_format: str
    mode: str
    partial: bool
    evolve: bool
    new: bool
    schema: str | None
    aside: CsvFiles | None = None
    _columns: StructType | None = None

    @cached_property
    def shape(self) -> str | StructType:
        """The columns of a table that is about to be made."""
        from floodmark.ingest.files import infer_schema

        return self.schema or infer_schema(self.lake.spark, self.files, self.file_format)

    @cached_property
    def _schema(self) -> Schema:
        from floodmark.rows.schema import table_schema

        return table_schema(self.shape) if self.new else self.lake.schema(self.table, branch=self.branch)

    @cached_property
    def _filled(self) -> Sequence[str]:
        return () if self.new else self.lake.filled_columns(self.table, branch=self.branch)

    def rows(self, *, set_aside: bool) -> DataFrame | pa.RecordBatchReader:
        if set_aside:
            self.aside = self._csv_files()
            if self.aside is None:
                raise Invalid("rows can be set aside only from files on this machine", files=",".join(self.files))
            return self.aside.good_rows()
        from floodmark.ingest.files import evolved_columns, read_files, read_parts
        from floodmark.rows.schema import spark_schema

        spark, columns = self.lake.spark, spark_schema(self._schema)
        merged = columns.names if self.mode == "merge" and not self.new else ()
        if self.evolve:
            columns = evolved_columns(spark, self.files, self.file_format, columns)
        self._columns = columns
        if self.partial and self.file_format == "json":
            return read_parts(spark, self.files, columns, filled=self._filled)
        return read_files(
            spark,
            self.files,
            self.file_format,
            columns,
            all_needed=not self.evolve and not self.partial,
            filled=self._filled,
            merged=merged,
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Rows that do not fit are looked for and named; what was set aside for a load that failed goes again."""
        from floodmark.ingest.files import explain

        try:
            yield
        except CommitUnknown:
            raise
        except FloodmarkError as error:
            if self.aside is not None:
                self.aside.forget_set_aside()
            if not isinstance(error, Invalid) or self._columns is None:
                raise
            found = self._mistakes() or explain(self.lake.spark, self.files, self.file_format, self._columns)
            raise found or error from error

    def _mistakes(self) -> Invalid | None:
        """The first mistakes of each kind, with their places; None if this process finds none, or no file."""
        judged = self._csv_files() if self.file_format == "csv" and not self.evolve else None
        try:
            return None if judged is None else judged.find_mistakes()
        except Invalid as error:
            return error  # a row that ends the reading: a quote that is not closed, say
        except FloodmarkError:
            return None

    def _csv_files(self) -> CsvFiles | None:
        """The files as they are judged in this process; None if they are elsewhere."""
        from floodmark.ingest.csv_rows import CsvFiles
        from floodmark.rows.convert import table_shape

        local = CsvFiles.local_files(self.files)
        if local is None:
            return None
        columns = table_shape(self._schema.model_dump_json()).columns
        return CsvFiles(local, columns, self._filled, partial=self.partial)


def _write(
    target: Lake | Transaction,
    mode: str,
    table: str,
    rows: DataFrame | pa.RecordBatchReader,
    where: str | None,
    last_by: str | None,
    **options: Any,
) -> Any:
    if mode == "merge":
        return target.merge(table, rows, on_duplicate="last" if last_by else None, order=last_by, **options)
    if mode == "overwrite":
        return target.overwrite(table, rows, where=where, **options)
    return target.append(table, rows, **options)


def _tell(
    context: typer.Context, table: str, batch: str | None, commit: Commit, seconds: float, aside: CsvFiles | None
) -> None:
    done = commit.tables if commit.outcome == "committed" else ()
    added, updated, deleted = (
        sum(getattr(part, name) for part in done) for name in ("rows_added", "rows_updated", "rows_deleted")
    )
    data: dict[str, Json] = {**commit.as_dict(), "rows": added + updated, "seconds": round(seconds, 3)}
    if commit.outcome == "committed" and (updated or deleted):
        text = f"{added} rows added, {updated} updated, {deleted} deleted in {table}, version {commit.version}"
    elif commit.outcome == "committed":
        text = f"{added} rows into {table}, version {commit.version}"
    elif commit.outcome == "already_committed":
        text = f"nothing to do: batch {batch} was already committed to {table} in version {commit.version}"
    elif commit.kind == "merge":
        text = "nothing to do: the table has all of these rows already"
    else:
        text = "nothing to do: the files have no rows"
    if aside is not None:
        mistakes = [asdict(one) for one in aside.mistakes.first]
        data |= {"bad_rows": aside.mistakes.rows, "set_aside": aside.set_aside, "mistakes": mistakes}
    context.obj.output.result(data, text=text)
    if aside is not None and aside.mistakes.rows:
        context.obj.output.note(
            f"{aside.mistakes.rows} rows did not fit and were set aside: {', '.join(aside.set_aside)}"
        )
        for mistake in aside.mistakes.first:
            context.obj.output.note(f"  {mistake}")


def _check_bad_rows(bad_rows: str, file_format: str, *, evolve: bool) -> None:
    if bad_rows not in (REFUSE, SET_ASIDE):
        raise Invalid("unknown value of --bad-rows", bad_rows=bad_rows, advice=f"Use {REFUSE} or {SET_ASIDE}.")
    if bad_rows == SET_ASIDE and (file_format != "csv" or evolve):
        raise Invalid("only CSV rows can be set aside, and not with --evolve", format=file_format)


def _check_options(
    mode: str,
    create: bool,
    schema: str | None,
    key: list[str] | None,
    partition: list[str] | None,
    where: str | None,
    last_by: str | None,
    partial: bool,
) -> None:
    if mode not in ("append", "merge", "overwrite"):
        raise Invalid("unknown mode", mode=mode, advice="Use append, merge or overwrite.")
    if (schema or key or partition) and not create:
        raise Invalid("--schema, --key and --partition need --create")
    if where is not None and mode != "overwrite":
        raise Invalid("--where needs --mode overwrite")
    if last_by is not None and mode != "merge":
        raise Invalid("--last-by needs --mode merge")
    if partial and mode != "merge":
        raise Invalid("--partial needs --mode merge", advice="Appended rows have a value or null in every column.")


# ── delete ──


NOTHING = "nothing to do: no row matches"


def delete(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    where: Annotated[str, typer.Option(help="Rows to delete, as a Spark SQL condition, like \"country = 'XX'\".")],
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
    batch: Annotated[str | None, typer.Option(help="Id of this delete: a delete with the same id is a no-op.")] = None,
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
) -> None:
    """Delete the rows that match a condition."""
    output = context.obj.output
    if not apply:
        with context.obj.open() as lake:
            plan = lake.plan_delete(table, where, branch=branch)
        text = (
            f"would delete {plan['rows']} of {plan['rows_total']} rows of {table}, "
            f"which are in {plan['files']} of {plan['files_total']} files"
        )
        output.result({"outcome": "planned", **plan}, text=text if plan["rows"] else NOTHING)
        if plan["rows"]:
            output.note("Add --apply to do it.")
        return
    started = time.monotonic()
    with context.obj.open(read_only=False) as lake, staging_progress(output) as progress:
        note = message or f"delete where {where}"
        commit = lake.delete(
            table, where, batch=batch, message=note, branch=branch, if_version=if_version, progress=progress
        )
    rows = sum(part.rows_deleted for part in commit.tables) if commit.outcome == "committed" else 0
    texts = f"{rows} rows deleted from {table}", f"batch {batch} was already committed to {table}", NOTHING
    _tell_changed(context, commit, rows, texts, time.monotonic() - started)


def _tell_changed(
    context: typer.Context, commit: Commit, rows: int, texts: tuple[str, str, str], seconds: float
) -> None:
    """`texts`: what was done, what was done before, and that there was nothing to do."""
    done, already, nothing = texts
    data = {**commit.as_dict(), "rows": rows, "seconds": round(seconds, 3)}
    if commit.outcome == "committed":
        text = f"{done}, version {commit.version}"
    elif commit.outcome == "already_committed":
        text = f"nothing to do: {already} in version {commit.version}"
    else:
        text = nothing
    context.obj.output.result(data, text=text)


# ── update ──


def update(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    where: Annotated[str, typer.Option(help='Rows to update, as a Spark SQL condition; "true" is all of them.')],
    assigned: Annotated[
        list[str], typer.Option("--set", help="Column and Spark SQL expression: \"country = 'NL'\"; may be repeated.")
    ],
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
    batch: Annotated[str | None, typer.Option(help="Id of this update: an update with the same id is a no-op.")] = None,
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
) -> None:
    """Give the rows that match a condition new values."""
    output, values = context.obj.output, _assignments(assigned)
    if not apply:
        with context.obj.open() as lake:
            plan = lake.plan_update(table, values, where, branch=branch)
        text = (
            f"would update up to {plan['rows']} of {plan['rows_total']} rows of {table}, "
            f"which are in {plan['files']} of {plan['files_total']} files"
        )
        output.result({"outcome": "planned", **plan}, text=text if plan["rows"] else NOTHING)
        if plan["rows"]:
            output.note("Add --apply to do it.")
        return
    started = time.monotonic()
    with context.obj.open(read_only=False) as lake, staging_progress(output) as progress:
        note = message or f"update {', '.join(assigned)} where {where}"
        commit = lake.update(
            table, values, where, batch=batch, message=note, branch=branch, if_version=if_version, progress=progress
        )
    rows = sum(part.rows_updated for part in commit.tables) if commit.outcome == "committed" else 0
    nothing = "nothing to do: all rows that match have these values"
    texts = f"{rows} rows updated in {table}", f"batch {batch} was already committed to {table}", nothing
    _tell_changed(context, commit, rows, texts, time.monotonic() - started)


def _assignments(assigned: Sequence[str]) -> dict[str, str]:
    """`column = expression`, as given by each --set."""
    found: dict[str, str] = {}
    for text in assigned:
        name, sign, expression = text.partition("=")
        name = name.strip().strip("`")
        if not sign or not name:
            advice = "Write it like: --set \"country = 'NL'\"."
            raise Invalid("--set needs a column and its new value", given=text, advice=advice)
        if name in found:
            raise Invalid("a column has two new values", column=name, advice="Name it in one --set.")
        found[name] = expression.strip()
    return found
