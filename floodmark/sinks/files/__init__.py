"""A sink that writes files, locally or to S3."""
