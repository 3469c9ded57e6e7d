"""Looking, without touching: what `floodmark doctor` asks of the machine and of a lake."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.journal import STAGED, STAGING, STATES
from floodmark.catalog.processes import is_dead
from floodmark.errors import FloodmarkError
from floodmark.model import BEGINNING
from floodmark.rows.session import check_java


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


def examine_machine() -> list[Check]:
    checks = [Check("python", sys.version_info >= (3, 11), sys.version.split()[0])]
    try:
        checks.append(Check("java", True, f"version {check_java()}"))
    except FloodmarkError as error:
        checks.append(Check("java", False, str(error)))
    checks += [Check(name, True, importlib.metadata.version(name)) for name in ("pyspark", "pyiceberg", "pyarrow")]
    return checks


def examine_lake(catalog: Catalog) -> list[Check]:
    row = catalog.lake_row()
    checks = [Check("catalog", True, f"{catalog.database.shown_url} format={row.format} version={row.version}")]
    checks.append(_examine_journal(catalog))
    heads = catalog.history.heads()
    current = catalog.history.current_tables("main", [head.table for head in heads])
    for head in heads:
        try:
            known = current[head.table]
            if known.pointer != known.pointer_known:
                checks.append(
                    Check(
                        f"table {head.table}",
                        False,
                        f"moved past Floodmark's door: {known.pointer} instead of {known.pointer_known}",
                    )
                )
                continue
            deletions = [file.location for file in catalog.history.deletions(head, BEGINNING, head.sequence)]
            wanted = [*catalog.files.data_files(head), *deletions]
            missing = [path for path in wanted if not catalog.storage.exists(path)]
            detail = f"{head.files} files, {head.rows} rows" if not missing else f"missing: {', '.join(missing[:5])}"
            checks.append(Check(f"table {head.table}", not missing, detail))
        except FloodmarkError as error:
            checks.append(Check(f"table {head.table}", False, str(error)))
    return checks


def _examine_journal(catalog: Catalog) -> Check:
    rows, now = catalog.journal.unfinished()
    unknown = [row.id for row in rows if row.state not in STATES]
    dead = [row.id for row in rows if row.state in (STAGING, STAGED) and is_dead(row, now)]
    broken = []
    for operation in [row.id for row in rows if row.state == STAGED]:
        try:
            catalog.journal.read_seal(operation)
        except FloodmarkError:
            broken.append(operation)
    if unknown or broken:
        return Check(
            "journal",
            False,
            f"cannot be understood: {', '.join(unknown + broken)};"
            " `floodmark recover --discard OPERATION --apply` gives one up",
        )
    if dead:
        return Check("journal", True, f"{len(dead)} dead operation(s); the next write settles them")
    running = sum(1 for row in rows if row.state in (STAGING, STAGED))
    return Check("journal", True, f"{running} at work, {len(rows) - running} at their end but still looked after")
