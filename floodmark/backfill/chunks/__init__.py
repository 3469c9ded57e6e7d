"""Years of history, loaded chunk by chunk, each once."""
