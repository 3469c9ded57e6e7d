"""Format 4: what maintenance needs to know: expired states, upkeep of tables, consumers' marks, records of runs."""

import sqlalchemy as sa
from alembic import op

revision = "f0004"
down_revision = "f0003"


def upgrade() -> None:
    op.create_table(
        "fm_expired",
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("table_id", sa.String(36), primary_key=True),
        sa.Column("expired_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fm_upkeep",
        sa.Column("table_id", sa.String(36), primary_key=True),
        sa.Column("retention", sa.Text),
        sa.Column("retention_column", sa.Text),
        sa.Column("small_files", sa.BigInteger),
        sa.Column("deletions_floor", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fm_consumers",
        sa.Column("name", sa.String(300), primary_key=True),
        sa.Column("table_id", sa.String(36), primary_key=True),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("mark", sa.BigInteger, nullable=False),
        sa.Column("protected", sa.Integer, nullable=False),
        sa.Column("updated_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fm_maintenance",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("verb", sa.String(16), nullable=False),
        sa.Column("table_id", sa.String(36), nullable=False),
        sa.Column("table_name", sa.String(255), nullable=False),
        sa.Column("outcome", sa.String(24), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("started_ms", sa.BigInteger, nullable=False),
        sa.Column("ended_ms", sa.BigInteger, nullable=False),
    )
    op.add_column("fm_deletions", sa.Column("below_ms", sa.BigInteger))
    op.create_index("fm_maintenance_newest", "fm_maintenance", ["table_id", "verb", "id"])
    # Tables that are there already: nobody has counted their small files.
    op.execute("INSERT INTO fm_upkeep (table_id, deletions_floor) SELECT DISTINCT table_id, -1 FROM fm_heads")
    op.execute(
        "INSERT INTO fm_expired (version, table_id, expired_ms)"
        " SELECT t.version, t.table_id, c.committed_ms FROM fm_commit_tables t"
        " JOIN fm_commits c ON c.version = t.version WHERE c.state = 'expired'"
    )
    op.execute("UPDATE fm_lake SET format = 4 WHERE id = 1")
