"""Progress of long work, on stderr, only where a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from floodmark.cli.output import Output


@contextmanager
def staging_progress(output: Output) -> Iterator[Callable[[int, int], None] | None]:
    """A line with the files and bytes staged so far. Gives None when nobody would see it."""
    if output.as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("staging", total=None)

        def show(files: int, size_bytes: int) -> None:
            bar.update(task, description=f"staging: {files} files, {size_bytes / 1e6:,.1f} MB")

        yield show
