"""Rows of a table at a version, what changed in it, and what is shipped."""
