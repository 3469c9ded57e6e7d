"""`floodmark audit`: what healing did, ever. No Spark."""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark.json_form import as_json
from floodmark.report.status import audit_line


def run(
    context: typer.Context, limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 50
) -> None:
    """List what healing did."""
    with context.obj.open() as lake:
        rows = [as_json(audit_line(row)) for row in lake.audit(limit)]
    context.obj.output.rows(rows, rows[0] if rows else (), name="audit", empty="nothing was ever healed")
