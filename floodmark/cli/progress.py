"""Progress of long work, on stderr, only where a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from floodmark.cli.output import Output, size_text


@contextmanager
def staging_progress(output: Output) -> Iterator[Callable[[int, int], None] | None]:
    """A line with the files and bytes staged so far. Gives None when nobody would see it."""
    with _line(output, "staging") as update:
        yield (
            None
            if update is None
            else lambda files, size_bytes: update(f"staging: {files} files, {size_bytes / 1e6:,.1f} MB")
        )


@contextmanager
def _line(output: Output, text: str) -> Iterator[Callable[[str], None] | None]:
    if output.as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda shown: bar.update(task, description=shown)


@contextmanager
def rows_progress(output: Output) -> Iterator[Callable[[int], None] | None]:
    """A line with the rows written so far. Gives None when nobody would see it."""
    with _line(output, "writing") as update:
        yield None if update is None else lambda rows: update(f"writing: {rows:,} rows")


@contextmanager
def upkeep_progress(output: Output) -> Iterator[Callable[[str, str, int, int], None] | None]:
    """A line with the verb and table at work, and how far it is. Gives None when nobody would see it."""
    with _line(output, "maintaining") as update:
        yield (
            None
            if update is None
            else lambda verb, table, done, total: update(f"{verb} {table}: {done:,} of {total:,}")
        )


@contextmanager
def units_progress(output: Output) -> Iterator[Callable[[str, int, int, int], None] | None]:
    """A bar of the rows of the unit that is being shipped. Gives None when nobody would see it."""
    if output.as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("shipping", total=None)

        def show(table: str, rows: int, rows_max: int, size_bytes: int) -> None:
            said = f"shipping {table}: {rows:,} of at most {rows_max:,} rows, {size_text(size_bytes)}"
            bar.update(task, description=said, completed=rows, total=rows_max or None)

        yield show
