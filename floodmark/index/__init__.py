"""Indexes in use: which data files their segments cover, segments for new files, and rows found by a key or a value."""
