"""Alembic's scripts for the catalog database. Each one ends by raising the format stamp in fm_lake."""
