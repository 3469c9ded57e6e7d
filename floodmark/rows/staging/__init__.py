"""Staging: incoming rows become data files."""
