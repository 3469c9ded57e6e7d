"""Progress of long work, on stderr, only if that is a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from floodmark.cli.output import Output, size_text
from floodmark.runs import WriteCallback

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

# A line that says more often how many rows there are is not read, and takes time.
_ROWS_SHOWN = 1000


def _is_shown(output: Output) -> bool:
    """Whether a line can come and go on stderr: a terminal that cannot move its cursor would keep an empty one."""
    return not output.as_json and sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextmanager
def staging_progress(output: Output) -> Iterator[WriteCallback | None]:
    """A line with the files and bytes staged so far. None without a terminal."""
    with _line(output, "staging") as update:
        yield (
            None
            if update is None
            else lambda files, size_bytes: update(f"staging: {files} files, {size_bytes / 1e6:,.1f} MB")
        )


@contextmanager
def _line(output: Output, text: str) -> Iterator[Callable[[str], None] | None]:
    if not _is_shown(output):
        yield None
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with _bar(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task(text, total=None)
        yield lambda shown: bar.update(task, description=shown)


def _bar(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    # By default Progress sends what is printed meanwhile to its own terminal, also rows that are meant for a file.
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)


@contextmanager
def rows_progress(output: Output) -> Iterator[Callable[[int], None] | None]:
    """A line with the rows written so far. None without a terminal."""
    with _line(output, "writing") as update:
        yield None if update is None else lambda rows: update(f"writing: {rows:,} rows")


Row = TypeVar("Row")


class AnswerProgress:
    """A line with how long an answer takes, and how many rows came. `rows` are passed on one by one, `stop` ends it.

    Where the rows go to a terminal, the line ends before the first of them: they may be the same terminal.
    """

    def __init__(self, what: str, update: Callable[[str], None] | None, stop: Callable[[], None]) -> None:
        self._what, self._update, self.stop = what, update, stop

    def rows(self, rows: Iterable[Row], count: Callable[[Row], int] = lambda row: 1) -> Iterator[Row]:
        came = shown = 0
        for row in rows:
            if not came and sys.stdout.isatty():
                self.stop()
            came += count(row)
            if self._update is not None and came >= shown + _ROWS_SHOWN:
                self._update(f"{self._what}: {came:,} rows")
                shown = came
            yield row
        self.stop()


@contextmanager
def answer_progress(what: str) -> Iterator[AnswerProgress]:
    """Of rows that are shown; also with --json, as stderr gets it. Without a terminal it shows nothing."""
    with ExitStack() as stack:
        yield AnswerProgress(what, stack.enter_context(_line(Output(), what)), stack.close)


@contextmanager
def maintenance_progress(output: Output) -> Iterator[Callable[[str, str, int, int], None] | None]:
    """A line with the verb and table at work, and how far it is. None without a terminal."""
    with _line(output, "maintaining") as update:
        yield (
            None
            if update is None
            else lambda verb, table, done, total: update(f"{verb} {table}: {done:,} of {total:,}")
        )


@contextmanager
def units_progress(output: Output) -> Iterator[Callable[[str, int, int, int], None] | None]:
    """A bar of the rows of the unit that is being shipped. None without a terminal."""
    if not _is_shown(output):
        yield None
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    with _bar(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("shipping", total=None)

        def show(table: str, rows: int, rows_max: int, size_bytes: int) -> None:
            said = f"shipping {table}: {rows:,} of at most {rows_max:,} rows, {size_text(size_bytes)}"
            bar.update(task, description=said, completed=rows, total=rows_max or None)

        yield show


@contextmanager
def job_progress(
    output: Output, name: str, unit: str, *, follows: bool = False
) -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar of a job: how much of how much, how fast, and how long it will take. None without a terminal.

    `follows`: the job has no end, so it is not shown as done when it has caught up.
    """
    if not _is_shown(output):
        yield None
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    said = TextColumn("{task.fields[said]}")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), said, TimeElapsedColumn())
    with _bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(name, total=None, said="checking what is done")
        begun: list[tuple[float, int]] = []

        def show(processed: int, total: int | None) -> None:
            now_s = time.monotonic()
            if follows and total is not None and processed >= total:
                total = None
            if not begun:
                # What an earlier run did is not this one's pace.
                begun.append((now_s, processed))
                bar.reset(task, total=total, completed=processed)
            text = f"{processed:,} {unit}" if total is None else f"{processed:,} of {total:,} {unit}"
            spent_s, done = now_s - begun[0][0], processed - begun[0][1]
            pace = f", {done / spent_s:,.1f}/s" if done > 0 and spent_s > 0 else ""
            bar.update(task, completed=processed, total=total, said=text + pace)

        yield show
