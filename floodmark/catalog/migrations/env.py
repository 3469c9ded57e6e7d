"""Alembic's entry: migrates on the connection (and inside the transaction) that lifecycle.py passes."""

from alembic import context

from floodmark.catalog import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.metadata,
    version_table="fm_migrations",
)
with context.begin_transaction():
    context.run_migrations()
