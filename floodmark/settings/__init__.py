"""The settings file: what it may hold, where each value stands in it, and schedules."""
