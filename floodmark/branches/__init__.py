"""Branches of the whole lake: made, compared and merged."""
