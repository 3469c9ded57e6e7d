"""Load on a real daemon, for tests and figures: clients that send rows, kills, and a check of the rows."""
