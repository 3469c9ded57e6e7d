"""`floodmark demo`: a lake, a stream of rows, kills at random, and what came of it."""
