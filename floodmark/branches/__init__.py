"""Branches of the whole lake: made, compared and merged; and its versions: compared, and returned to."""
