"""The settings file: its keys, the place of each value in it, and schedules."""
