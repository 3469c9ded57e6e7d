"""The state of a lake, from the catalog alone: for the commands, HTTP, metrics and the page alike. No Spark."""
