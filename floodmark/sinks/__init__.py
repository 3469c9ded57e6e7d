"""Sinks: they ship each row of the lake once."""
