"""Rows as JSON text, and back."""
