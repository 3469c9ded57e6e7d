"""The lake over HTTP: the server, its limits and tokens, rows that clients send, queries, events and metrics."""
