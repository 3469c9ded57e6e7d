"""Tables of the lake as an expression of a write sees them: each at the head of the write's branch.

What the same change has staged is not seen: nothing refers to it yet (I3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from floodmark.commit.catalog import Catalog
from floodmark.commit.metadata import has_renamed_columns, schema_of
from floodmark.errors import NotFound
from floodmark.model import MAIN
from floodmark.rows.session import Sessions

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame


def tables_at_head(catalog: Catalog, sessions: Sessions, branch: str = MAIN) -> Callable[[str], DataFrame]:
    """Returns a table by its name, in any case; `NotFound` if it does not exist."""

    def read(name: str) -> DataFrame:
        from floodmark.rows.reading.scan import scan

        heads = [head for head in catalog.history.heads(branch) if head.table.lower() == name.lower()]
        if not heads:
            raise NotFound("there is no such table", table=name, advice="`floodmark tables` lists them.")
        metadata = catalog.files.metadata(heads[0].metadata_location)
        return scan(
            sessions.get(),
            catalog.files.data_files(heads[0]),
            schema_of(metadata, heads[0]),
            storage_options=catalog.storage.options,
            # Spark matches columns by id, but pushes filters down by name.
            arrow=True if has_renamed_columns(metadata) else None,
        )

    return read
