"""The catalog: one SQL database that decides what is true about a lake."""
