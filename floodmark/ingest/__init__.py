"""Ways in: where rows come from."""
