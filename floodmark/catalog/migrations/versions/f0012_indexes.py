"""Format 12: indexes, and the segments that cover data files."""

import sqlalchemy as sa
from alembic import op

revision = "f0012"
down_revision = "f0011"


def upgrade() -> None:
    op.create_table(
        "fm_indexes",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("table_id", sa.String(36), nullable=False),
        sa.Column("field_ids", sa.String(500), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("encoder", sa.Integer, nullable=False),
        sa.Column("wide", sa.Integer, nullable=False),
        sa.Column("secret", sa.String(32), nullable=False),
        sa.Column("changes", sa.BigInteger, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("table_id", "kind", "field_ids", name="fm_indexes_on"),
    )
    op.create_table(
        "fm_segments",
        sa.Column("index_id", sa.String(26), primary_key=True),
        sa.Column("location", sa.String(1000), primary_key=True),
        sa.Column("table_id", sa.String(36), nullable=False),
        sa.Column("operation", sa.String(26), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("tail_bytes", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("entries", sa.BigInteger, nullable=False),
        sa.Column("files", sa.BigInteger, nullable=False),
        sa.Column("broken", sa.Integer, nullable=False),
        sa.Column("retired_ms", sa.BigInteger),
    )
    op.create_index("fm_segments_table", "fm_segments", ["table_id"])
    op.create_index("fm_segments_operation", "fm_segments", ["operation"])
    op.create_index("fm_segments_location", "fm_segments", ["location"])
    op.execute("UPDATE fm_lake SET format = 12 WHERE id = 1")
