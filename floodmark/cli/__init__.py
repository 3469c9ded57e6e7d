"""The command line: one file per command, one place for output."""
