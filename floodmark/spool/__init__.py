"""A spool: rows that are durable on a local disk until they are in their table."""
