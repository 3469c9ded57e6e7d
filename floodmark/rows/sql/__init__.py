"""What Spark SQL and Arrow make of queries, conditions and expressions."""
