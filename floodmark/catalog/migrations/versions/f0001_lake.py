"""Format 1: Iceberg's own tables, the lake row, journal, history, branches, batch ids and audit."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "f0001"
down_revision = None

LONG = sa.BigInteger


def upgrade() -> None:
    op.create_table(
        "iceberg_tables",
        sa.Column("catalog_name", sa.String(255), primary_key=True),
        sa.Column("table_namespace", sa.String(255), primary_key=True),
        sa.Column("table_name", sa.String(255), primary_key=True),
        sa.Column("metadata_location", sa.String(1000)),
        sa.Column("previous_metadata_location", sa.String(1000)),
        sa.Column("iceberg_type", sa.String(5)),
    )
    op.create_table(
        "iceberg_namespace_properties",
        sa.Column("catalog_name", sa.String(255), primary_key=True),
        sa.Column("namespace", sa.String(255), primary_key=True),
        sa.Column("property_key", sa.String(255), primary_key=True),
        sa.Column("property_value", sa.String(1000), nullable=False),
    )
    op.create_table(
        "fm_lake",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("format", sa.Integer, nullable=False),
        sa.Column("version", LONG, nullable=False),
        sa.Column("incarnation", sa.String(26), nullable=False),
        sa.Column("location", sa.Text, nullable=False),
        sa.Column("created_ms", LONG, nullable=False),
    )
    op.create_table(
        "fm_processes",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("boot_id", sa.Text, nullable=False),
        sa.Column("pid_namespace", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("started", sa.Text, nullable=False),
        sa.Column("beat_ms", LONG, nullable=False),
        sa.Column("lease_ms", LONG, nullable=False),
    )
    op.create_table(
        "fm_operations",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("branch", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("process", sa.String(26), nullable=False),
        sa.Column("base_version", LONG, nullable=False),
        sa.Column("begun_ms", LONG, nullable=False),
        sa.Column("ended_ms", LONG),
        sa.Column("folders", sa.Text, nullable=False),
        sa.Column("seal", sa.Text),
        sa.Column("seal_location", sa.Text),
        sa.Column("seal_hash", sa.String(64)),
        sa.Column("version", LONG),
        sa.Column("cleaned", sa.Integer, nullable=False),
    )
    # Asked at the entry of every write: holds only what is not at its end, however long the journal grows.
    unfinished = sa.text("cleaned = 0")
    op.create_index(
        "fm_operations_unfinished", "fm_operations", ["id"], sqlite_where=unfinished, postgresql_where=unfinished
    )
    op.create_table(
        "fm_commits",
        sa.Column("version", LONG, primary_key=True, autoincrement=False),
        sa.Column("parent", LONG, nullable=False),
        sa.Column("branch", sa.Text, nullable=False),
        sa.Column("operation", sa.String(26), nullable=False, unique=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("committed_ms", LONG, nullable=False, index=True),
        sa.Column("state", sa.String(16), nullable=False),
    )
    state: list[tuple[str, Any, bool]] = [
        ("table_name", sa.String(255), False),
        ("snapshot", LONG, True),
        ("sequence", LONG, False),
        ("schema_id", sa.Integer, False),
        ("spec_id", sa.Integer, False),
        ("manifest_list", sa.Text, True),
        ("metadata_location", sa.Text, False),
        ("rows_total", LONG, False),
        ("files_total", LONG, False),
        ("bytes_total", LONG, False),
    ]
    op.create_table(
        "fm_commit_tables",
        sa.Column("version", LONG, primary_key=True, autoincrement=False),
        sa.Column("table_id", sa.String(36), primary_key=True),
        *(sa.Column(name, type_, nullable=nullable) for name, type_, nullable in state),
        sa.Column("rows_added", LONG, nullable=False),
        sa.Column("rows_updated", LONG, nullable=False),
        sa.Column("rows_deleted", LONG, nullable=False),
    )
    # A table's newest state, and its state at a version, without reading its whole history.
    op.create_index("fm_commit_tables_newest", "fm_commit_tables", ["table_id", "version"])
    op.create_table(
        "fm_branches",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("parent", sa.String(255)),
        sa.Column("base_version", LONG, nullable=False),
        sa.Column("head_version", LONG, nullable=False),
        sa.Column("created_ms", LONG, nullable=False),
    )
    op.create_table(
        "fm_heads",
        sa.Column("branch", sa.String(255), primary_key=True),
        sa.Column("table_id", sa.String(36), primary_key=True),
        *(sa.Column(name, type_, nullable=nullable) for name, type_, nullable in state),
        sa.Column("version", LONG, nullable=False),
    )
    op.create_table(
        "fm_sources",
        sa.Column("scope", sa.String(300), primary_key=True),
        sa.Column("id", sa.String(512), primary_key=True),
        sa.Column("version", LONG, nullable=False),
        sa.Column("operation", sa.String(26), nullable=False),
    )
    op.create_table(
        "fm_audit",
        sa.Column("operation", sa.String(26), primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("found", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("version", LONG),
        sa.Column("at_ms", LONG, nullable=False),
    )
    op.execute("UPDATE fm_lake SET format = 1 WHERE id = 1")
