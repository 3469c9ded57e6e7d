"""Backfills: years of history in chunks, and a new column for old rows."""
