"""What a lake says of itself, from the catalog alone: for the commands, HTTP, metrics and the page alike. No Spark."""
