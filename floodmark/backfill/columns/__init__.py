"""A new column, filled for old rows batch by batch."""
