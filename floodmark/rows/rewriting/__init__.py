"""Data files become other data files: rows taken out, gathered, filled, merged."""
