"""Format 7: branches: the line of each, and merges between them. Tables may be dropped, which needs no new column."""

import sqlalchemy as sa
from alembic import op

revision = "f0007"
down_revision = "f0006"


def _whole(name: str, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "fm_lines",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("parent", sa.String(26), nullable=False),
        *(_whole(name) for name in ("base_version", "born_version", "common_version", "sent_version")),
        *(_whole(name) for name in ("taken_version", "created_ms")),
        *(_whole(name, nullable=True) for name in ("ended_version", "ended_ms")),
        sa.Column("actor", sa.Text, nullable=False),
    )
    op.create_index("ix_fm_lines_name", "fm_lines", ["name"])
    op.create_table(
        "fm_merges",
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("source", sa.String(26), nullable=False),
        _whole("source_version"),
        sa.Column("target", sa.String(26), nullable=False),
        sa.Column("settled", sa.Text, nullable=False),
    )
    op.create_table(
        "fm_sink_lines",
        sa.Column("sink", sa.String(26), primary_key=True),
        sa.Column("line", sa.String(26), nullable=False),
    )
    op.execute("UPDATE fm_lake SET format = 7 WHERE id = 1")
