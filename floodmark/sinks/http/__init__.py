"""A sink over HTTP: another lake, or any endpoint."""
