"""A sink that writes an Iceberg table elsewhere."""
