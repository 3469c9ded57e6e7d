"""The indexes of the catalog's tables that a column alone does not tell; the migrations make the same ones."""

from __future__ import annotations

from sqlalchemy import Index, text

from floodmark.catalog import tables


def _partial(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> Index:
    known, condition = tables.metadata.tables[table], text(where)
    held = [known.c[column] for column in columns]
    return Index(name, *held, unique=unique, sqlite_where=condition, postgresql_where=condition)


INDEXES = (
    _partial("fm_operations_unfinished", "fm_operations", ["id"], "cleaned = 0"),
    _partial("fm_units_open", "fm_units", ["sink", "table_id", "lane"], "state = 'open'", unique=True),
    Index("fm_commit_tables_newest", tables.commit_tables.c.table_id, tables.commit_tables.c.version),
    Index("fm_maintenance_newest", *(tables.maintenance.c[name] for name in ("table_id", "verb", "id"))),
    Index("fm_units_newest", *(tables.units.c[name] for name in ("sink", "table_id", "id"))),
    Index("fm_quarantine_place", tables.quarantine.c.unit, tables.quarantine.c.position, unique=True),
    Index("fm_quarantine_sink", *(tables.quarantine.c[name] for name in ("sink", "table_id", "id"))),
)
