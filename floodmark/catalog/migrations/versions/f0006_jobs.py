"""Format 6: long work: jobs with progress, and the chunks of history that they have loaded."""

import sqlalchemy as sa
from alembic import op

revision = "f0006"
down_revision = "f0005"


def _whole(name: str, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "fm_jobs",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("name", sa.String(300), nullable=False, unique=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("table_names", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        _whole("processed"),
        _whole("total", nullable=True),
        sa.Column("unit", sa.String(16), nullable=False),
        *(_whole(name) for name in ("resumed_from", "rows_done", "unfilled", "publishes")),
        sa.Column("error", sa.Text),
        sa.Column("actor", sa.Text, nullable=False),
        _whole("created_ms"),
        _whole("started_ms", nullable=True),
        _whole("updated_ms"),
        *(_whole(name, nullable=True) for name in ("ended_ms", "acknowledged_ms", "cancel_ms")),
        sa.Column("owner_process", sa.String(26)),
        sa.Column("owner_run", sa.String(26)),
    )
    op.create_table(
        "fm_chunks",
        sa.Column("job", sa.String(26), primary_key=True),
        sa.Column("chunk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("table_name", sa.String(255), primary_key=True),
        sa.Column("table_id", sa.String(36), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        *(_whole(name) for name in ("rows_total", "version")),
        sa.Column("operation", sa.String(26), nullable=False),
        _whole("done_ms"),
    )
    op.execute("UPDATE fm_lake SET format = 6 WHERE id = 1")
