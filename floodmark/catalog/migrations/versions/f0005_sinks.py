"""Format 5: ways out: sinks, their units and parts, quarantine; senders of other lakes; marks that cannot go down."""

import sqlalchemy as sa
from alembic import op

revision = "f0005"
down_revision = "f0004"

# A mark never goes down within an epoch, and an epoch never (I7): the database says so too.
FALLING = "NEW.epoch < OLD.epoch OR (NEW.epoch = OLD.epoch AND NEW.mark < OLD.mark)"


def _whole(name: str, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    _make_sinks()
    _make_units()
    _make_senders()
    _forbid_falling_marks()
    op.execute("UPDATE fm_lake SET format = 5 WHERE id = 1")


def _make_sinks() -> None:
    op.create_table(
        "fm_sinks",
        sa.Column("name", sa.String(300), primary_key=True),
        sa.Column("id", sa.String(26), nullable=False, unique=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("table_names", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("runner_process", sa.String(26)),
        sa.Column("runner_run", sa.String(26)),
        sa.Column("error", sa.Text),
        _whole("error_ms", nullable=True),
        _whole("created_ms"),
        _whole("updated_ms"),
    )
    op.create_table(
        "fm_sink_tables",
        sa.Column("sink", sa.String(26), primary_key=True),
        sa.Column("table_name", sa.String(255), primary_key=True),
        sa.Column("table_id", sa.String(36), nullable=False),
        sa.Column("incarnation", sa.String(26), nullable=False),
        sa.Column("destination", sa.Text),
        *(_whole(name) for name in ("units", "rows_sent", "deletions_sent", "bytes_sent", "replays", "retries")),
        sa.Column("last_unit", sa.Text),
    )


def _make_units() -> None:
    op.create_table(
        "fm_units",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("sink", sa.String(26), nullable=False),
        sa.Column("table_id", sa.String(36), nullable=False),
        sa.Column("lane", sa.String(16), nullable=False),
        *(_whole(name) for name in ("epoch", "since", "until")),
        sa.Column("pin", sa.String(26)),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        *(_whole(name) for name in ("rows_sent", "deletions_sent", "bytes_sent", "quarantined", "opened_ms")),
        _whole("ended_ms", nullable=True),
    )
    op.create_table(
        "fm_parts",
        sa.Column("unit", sa.String(26), primary_key=True),
        sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),
        _whole("last"),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_table(
        "fm_quarantine",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("sink", sa.String(26), nullable=False),
        sa.Column("table_id", sa.String(36), nullable=False),
        sa.Column("unit", sa.String(26), nullable=False),
        _whole("position"),
        sa.Column("line", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        *(_whole(name) for name in ("tries", "first_ms", "last_ms")),
        sa.Column("retry_unit", sa.String(26)),
        _whole("retry_position", nullable=True),
    )
    # One unit at a time for each table of a sink: whoever else has one in mind finds out here.
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
    op.create_index("fm_quarantine_place", "fm_quarantine", ["unit", "position"], unique=True)
    op.create_index("fm_quarantine_sink", "fm_quarantine", ["sink", "table_id", "id"])


def _make_senders() -> None:
    op.create_table(
        "fm_senders",
        sa.Column("sender", sa.String(200), primary_key=True),
        sa.Column("table_id", sa.String(36), primary_key=True),
        *(_whole(name) for name in ("epoch", "mark", "since", "until")),
        sa.Column("ranges", sa.Text, nullable=False),
        _whole("version"),
        _whole("updated_ms"),
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
