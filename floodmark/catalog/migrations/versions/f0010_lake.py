"""Format 10: every table of the first release. Frozen: a later change of the catalog is a migration of its own.

Like each migration it runs inside the transaction that makes or opens the lake: a crash leaves no table.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "f0010"
down_revision = None

# A mark never goes down within an epoch, and an epoch never (I7): the database enforces it too.
FALLING = "NEW.epoch < OLD.epoch OR (NEW.epoch = OLD.epoch AND NEW.mark < OLD.mark)"


def upgrade() -> None:
    _make_iceberg()
    _make_lake()
    _make_journal()
    _make_history()
    _make_branches()
    _make_sources()
    _make_upkeep()
    _make_sinks()
    _make_units()
    _make_quarantine()
    _make_senders()
    _make_jobs()
    _make_spools()
    _make_daemon()
    _forbid_falling_marks()
    op.execute("UPDATE fm_lake SET format = 10 WHERE id = 1")


def _text(name: str, length: int | None = None, nullable: bool = False, **more: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text() if length is None else sa.String(length), nullable=nullable, **more)


def _whole(name: str, nullable: bool = False, **more: Any) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable, **more)


def _make_iceberg() -> None:
    """In the shape that PyIceberg's SqlCatalog and the Java JDBC catalog expect."""
    op.create_table(
        "iceberg_tables",
        _text("catalog_name", 255, primary_key=True),
        _text("table_namespace", 255, primary_key=True),
        _text("table_name", 255, primary_key=True),
        _text("metadata_location", 1000, nullable=True),
        _text("previous_metadata_location", 1000, nullable=True),
        _text("iceberg_type", 5, nullable=True),
    )
    op.create_table(
        "iceberg_namespace_properties",
        _text("catalog_name", 255, primary_key=True),
        _text("namespace", 255, primary_key=True),
        _text("property_key", 255, primary_key=True),
        _text("property_value", 1000),
    )


def _make_lake() -> None:
    op.create_table(
        "fm_lake",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("format", sa.Integer, nullable=False),
        _whole("version"),
        _text("incarnation", 26),
        _text("location"),
        _whole("created_ms"),
    )
    op.create_table(
        "fm_processes",
        _text("id", 26, primary_key=True),
        _text("host"),
        _text("boot_id"),
        _text("pid_namespace"),
        sa.Column("pid", sa.Integer, nullable=False),
        _text("started"),
        _whole("beat_ms"),
        _whole("lease_ms"),
    )


def _make_journal() -> None:
    op.create_table(
        "fm_operations",
        _text("id", 26, primary_key=True),
        _text("kind", 32),
        _text("state", 16),
        _text("branch"),
        _text("actor"),
        _text("message"),
        _text("process", 26),
        _whole("base_version"),
        _whole("begun_ms"),
        _whole("ended_ms", nullable=True),
        _text("folders"),
        _text("seal", nullable=True),
        _text("seal_location", nullable=True),
        _text("seal_hash", 64, nullable=True),
        _whole("version", nullable=True),
        sa.Column("cleaned", sa.Integer, nullable=False),
    )
    # Asked at the entry of every write: holds only what is not at its end, however long the journal grows.
    unfinished = sa.text("cleaned = 0")
    op.create_index(
        "fm_operations_unfinished", "fm_operations", ["id"], sqlite_where=unfinished, postgresql_where=unfinished
    )
    op.create_table(
        "fm_audit",
        _text("operation", 26, primary_key=True),
        _text("kind", 32),
        _text("found", 16),
        _text("outcome", 16),
        _text("detail"),
        _whole("version", nullable=True),
        _whole("at_ms"),
    )
    op.create_table(
        "fm_turns",
        _text("table_id", 36, primary_key=True),
        _text("operation", 26),
        _whole("until_ms"),
    )


def _table_state() -> list[sa.Column[Any]]:
    """A table as a version left it, or as a branch has it."""
    return [
        _text("table_name", 255),
        _whole("snapshot", nullable=True),
        _whole("sequence"),
        sa.Column("schema_id", sa.Integer, nullable=False),
        sa.Column("spec_id", sa.Integer, nullable=False),
        _text("manifest_list", nullable=True),
        _text("metadata_location"),
        *(_whole(name) for name in ("rows_total", "files_total", "bytes_total")),
    ]


def _make_history() -> None:
    op.create_table(
        "fm_commits",
        _whole("version", primary_key=True, autoincrement=False),
        _whole("parent"),
        _text("branch"),
        _text("operation", 26, unique=True),
        _text("kind", 32),
        _text("actor"),
        _text("message"),
        _whole("committed_ms"),
        _text("state", 16),
    )
    op.create_index("ix_fm_commits_committed_ms", "fm_commits", ["committed_ms"])
    op.create_table(
        "fm_commit_tables",
        _whole("version", primary_key=True, autoincrement=False),
        _text("table_id", 36, primary_key=True),
        *_table_state(),
        *(_whole(name) for name in ("rows_added", "rows_updated", "rows_deleted")),
    )
    # A table's newest state, and its state at a version, without reading its whole history.
    op.create_index("fm_commit_tables_newest", "fm_commit_tables", ["table_id", "version"])
    op.create_table(
        "fm_pins",
        _text("id", 26, primary_key=True),
        _whole("version"),
        _text("holder"),
        _text("reason"),
        _whole("taken_ms"),
    )
    op.create_table(
        "fm_expired",
        _whole("version", primary_key=True, autoincrement=False),
        _text("table_id", 36, primary_key=True),
        _whole("expired_ms"),
    )


def _make_branches() -> None:
    op.create_table(
        "fm_branches",
        _text("name", 255, primary_key=True),
        _text("parent", 255, nullable=True),
        *(_whole(name) for name in ("base_version", "head_version", "created_ms")),
    )
    op.create_table(
        "fm_heads",
        _text("branch", 255, primary_key=True),
        _text("table_id", 36, primary_key=True),
        *_table_state(),
        _whole("version"),
    )
    op.create_table(
        "fm_lines",
        _text("id", 26, primary_key=True),
        _text("name", 255),
        _text("parent", 26),
        *(_whole(name) for name in ("base_version", "born_version", "common_version", "sent_version")),
        *(_whole(name) for name in ("taken_version", "created_ms")),
        *(_whole(name, nullable=True) for name in ("ended_version", "ended_ms")),
        _text("actor"),
    )
    op.create_index("ix_fm_lines_name", "fm_lines", ["name"])
    op.create_table(
        "fm_merges",
        _whole("version", primary_key=True, autoincrement=False),
        _text("source", 26),
        _whole("source_version"),
        _text("target", 26),
        _text("settled"),
    )


def _make_sources() -> None:
    op.create_table(
        "fm_sources",
        _text("scope", 300, primary_key=True),
        _text("id", 512, primary_key=True),
        _whole("version"),
        _text("operation", 26),
        _whole("position", nullable=True),
    )
    op.create_table(
        "fm_deletions",
        _text("table_id", 36, primary_key=True),
        _whole("sequence", primary_key=True),
        _text("location", 1000, primary_key=True),
        *(_whole(name) for name in ("version", "rows_total", "size_bytes")),
        _whole("below_ms", nullable=True),
    )


def _make_upkeep() -> None:
    op.create_table(
        "fm_upkeep",
        _text("table_id", 36, primary_key=True),
        _text("retention", nullable=True),
        _text("retention_column", nullable=True),
        _whole("small_files", nullable=True),
        _whole("deletions_floor"),
    )
    op.create_table(
        "fm_consumers",
        _text("name", 300, primary_key=True),
        _text("table_id", 36, primary_key=True),
        sa.Column("epoch", sa.Integer, nullable=False),
        _whole("mark"),
        sa.Column("protected", sa.Integer, nullable=False),
        _whole("updated_ms"),
    )
    op.create_table(
        "fm_maintenance",
        _text("id", 26, primary_key=True),
        _text("verb", 16),
        _text("table_id", 36),
        _text("table_name", 255),
        _text("outcome", 24),
        _text("detail"),
        _text("actor"),
        _whole("started_ms"),
        _whole("ended_ms"),
    )
    op.create_index("fm_maintenance_newest", "fm_maintenance", ["table_id", "verb", "id"])


def _make_sinks() -> None:
    op.create_table(
        "fm_sinks",
        _text("name", 300, primary_key=True),
        _text("id", 26, unique=True),
        _text("kind", 16),
        _text("table_names"),
        _text("settings"),
        _text("state", 16),
        _text("runner_process", 26, nullable=True),
        _text("runner_run", 26, nullable=True),
        _text("error", nullable=True),
        _whole("error_ms", nullable=True),
        _whole("created_ms"),
        _whole("updated_ms"),
    )
    op.create_table(
        "fm_sink_tables",
        _text("sink", 26, primary_key=True),
        _text("table_name", 255, primary_key=True),
        _text("table_id", 36),
        _text("incarnation", 26),
        _text("destination", nullable=True),
        *(_whole(name) for name in ("units", "rows_sent", "deletions_sent", "bytes_sent", "replays", "retries")),
        _text("last_unit", nullable=True),
        _whole("epoch_seen", nullable=True),
    )
    op.create_table(
        "fm_sink_lines",
        _text("sink", 26, primary_key=True),
        _text("line", 26),
    )
    op.create_table(
        "fm_sink_notes",
        _text("sink", 26, primary_key=True),
        _text("table_id", 36, primary_key=True),
        _text("note", 32, primary_key=True),
        _whole("value"),
        _whole("updated_ms"),
    )


def _make_units() -> None:
    op.create_table(
        "fm_units",
        _text("id", 26, primary_key=True),
        _text("sink", 26),
        _text("table_id", 36),
        _text("lane", 16),
        *(_whole(name) for name in ("epoch", "since", "until")),
        _text("pin", 26, nullable=True),
        _text("record"),
        _text("state", 16),
        *(_whole(name) for name in ("rows_sent", "deletions_sent", "bytes_sent", "quarantined", "opened_ms")),
        _whole("ended_ms", nullable=True),
        _whole("passed", nullable=True),
    )
    # One unit at a time for each table of a sink: a second one fails here.
    still_open = sa.text("state = 'open'")
    op.create_index(
        "fm_units_open",
        "fm_units",
        ["sink", "table_id", "lane"],
        unique=True,
        sqlite_where=still_open,
        postgresql_where=still_open,
    )
    op.create_index("fm_units_newest", "fm_units", ["sink", "table_id", "id"])
    op.create_table(
        "fm_parts",
        _text("unit", 26, primary_key=True),
        _whole("first", primary_key=True, autoincrement=False),
        _whole("last"),
        _text("digest", 64),
        _text("state", 16),
        _text("detail"),
    )


def _make_quarantine() -> None:
    op.create_table(
        "fm_quarantine",
        _text("id", 26, primary_key=True),
        _text("sink", 26),
        _text("table_id", 36),
        _text("unit", 26),
        _whole("position"),
        _text("line"),
        _text("reason"),
        *(_whole(name) for name in ("tries", "first_ms", "last_ms")),
        _text("retry_unit", 26, nullable=True),
        _whole("retry_position", nullable=True),
    )
    op.create_index("fm_quarantine_place", "fm_quarantine", ["unit", "position"], unique=True)
    op.create_index("fm_quarantine_sink", "fm_quarantine", ["sink", "table_id", "id"])


def _make_senders() -> None:
    op.create_table(
        "fm_senders",
        _text("sender", 200, primary_key=True),
        _text("table_id", 36, primary_key=True),
        *(_whole(name) for name in ("epoch", "mark", "since", "until")),
        _text("ranges"),
        _whole("version"),
        _whole("updated_ms"),
        _text("skipped", nullable=True),
        _text("unit", 26, nullable=True),
    )


def _make_jobs() -> None:
    op.create_table(
        "fm_jobs",
        _text("id", 26, primary_key=True),
        _text("name", 300, unique=True),
        _text("kind", 16),
        _text("table_names"),
        _text("spec"),
        _text("state", 16),
        _whole("processed"),
        _whole("total", nullable=True),
        _text("unit", 16),
        *(_whole(name) for name in ("resumed_from", "rows_done", "unfilled", "publishes")),
        _text("error", nullable=True),
        _text("actor"),
        _whole("created_ms"),
        _whole("started_ms", nullable=True),
        _whole("updated_ms"),
        *(_whole(name, nullable=True) for name in ("ended_ms", "acknowledged_ms", "cancel_ms")),
        _text("owner_process", 26, nullable=True),
        _text("owner_run", 26, nullable=True),
    )
    op.create_table(
        "fm_chunks",
        _text("job", 26, primary_key=True),
        _whole("chunk", primary_key=True, autoincrement=False),
        _text("table_name", 255, primary_key=True),
        _text("table_id", 36),
        _text("state", 16),
        *(_whole(name) for name in ("rows_total", "version")),
        _text("operation", 26),
        _whole("done_ms"),
    )


def _make_spools() -> None:
    op.create_table(
        "fm_spools",
        _text("table_id", 36, primary_key=True),
        _text("table_name", 255),
        _text("spool_id", 26),
        _text("host"),
        _text("folder"),
        _whole("position"),
        _whole("version", nullable=True),
        *(_whole(name) for name in ("rows_fed", "quarantined", "registered_ms", "updated_ms")),
    )
    op.create_table(
        "fm_spool_quarantine",
        _text("id", 26, primary_key=True),
        _text("table_id", 36),
        _text("table_name", 255),
        _text("spool_id", 26),
        *(_whole(name) for name in ("record", "rows_held")),
        _text("reason"),
        _text("location"),
        _whole("at_ms"),
        _text("state", 16),
        _whole("version", nullable=True),
    )
    op.create_index("ix_fm_spool_quarantine_table_id", "fm_spool_quarantine", ["table_id"])


def _make_daemon() -> None:
    op.create_table(
        "fm_daemon",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        _text("process", 26),
        _text("run", 26),
        _text("host"),
        sa.Column("pid", sa.Integer, nullable=False),
        _text("address", nullable=True),
        *(_whole(name) for name in ("started_ms", "updated_ms")),
        _text("tasks"),
    )


def _forbid_falling_marks() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            f"CREATE TRIGGER fm_marks_rise BEFORE UPDATE ON fm_consumers WHEN {FALLING}"
            " BEGIN SELECT RAISE(ABORT, 'a mark never goes down within an epoch'); END"
        )
        return
    op.execute(
        "CREATE FUNCTION fm_refuse_falling_mark() RETURNS trigger LANGUAGE plpgsql AS $$"
        " BEGIN RAISE EXCEPTION 'a mark never goes down within an epoch'"
        " USING ERRCODE = 'integrity_constraint_violation'; END $$"
    )
    op.execute(
        f"CREATE TRIGGER fm_marks_rise BEFORE UPDATE ON fm_consumers FOR EACH ROW WHEN ({FALLING})"
        " EXECUTE FUNCTION fm_refuse_falling_mark()"
    )
