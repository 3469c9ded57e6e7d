"""Repair: what `doctor` examines, and tables that another writer changed."""
