"""Format 11: operations that wait for a table's turn, and which operation published another one with its own."""

import sqlalchemy as sa
from alembic import op

revision = "f0011"
down_revision = "f0010"


def upgrade() -> None:
    op.create_table(
        "fm_waiting",
        sa.Column("operation", sa.String(26), primary_key=True),
        sa.Column("table_ids", sa.Text, nullable=False),
        sa.Column("since_ms", sa.BigInteger, nullable=False),
        sa.Column("joins", sa.Integer, nullable=False),
        sa.Column("asks", sa.Integer, nullable=False),
        sa.Column("leftovers", sa.Integer, nullable=False),
    )
    op.create_table(
        "fm_led",
        sa.Column("operation", sa.String(26), primary_key=True),
        sa.Column("leader", sa.String(26), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
    op.create_index("fm_led_leader", "fm_led", ["leader"])
    op.execute("UPDATE fm_lake SET format = 11 WHERE id = 1")
