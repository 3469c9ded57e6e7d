"""The lake over HTTP: the server, its limits and tokens, rows that come in, questions, events and metrics."""
