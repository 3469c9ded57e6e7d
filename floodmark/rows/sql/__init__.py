"""Queries, conditions and expressions, evaluated by Spark SQL and Arrow."""
