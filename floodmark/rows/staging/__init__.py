"""Rows that come in become data files."""
