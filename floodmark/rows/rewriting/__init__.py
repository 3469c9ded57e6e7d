"""Rewriting of data files into others: rows removed, gathered, filled, merged."""
