"""A Floodmark of the next format: real scripts with one migration more, in this process or in a child.

Only the number and the folder of scripts are other ones. Locks, transactions, Alembic and kills are what they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from floodmark.catalog import lifecycle, tables

LATER = Path(__file__).parent / "data" / "later"


def later_scripts(folder: Path) -> str:
    """The scripts of today and the migration after them, in a new folder."""
    shutil.copytree(lifecycle.SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for script in LATER.glob("f*.py"):
        shutil.copy(script, folder / "versions")
    return str(folder)


@contextmanager
def later_floodmark(scripts: str) -> Iterator[None]:
    """Inside, this process knows the next format, and how lakes of today's get there."""
    today = tables.FORMAT, lifecycle.SCRIPTS
    tables.FORMAT, lifecycle.SCRIPTS = tables.FORMAT + 1, Path(scripts)
    try:
        yield
    finally:
        tables.FORMAT, lifecycle.SCRIPTS = today
