"""Schema as code: a file that declares tables, the difference to the lake as a plan, and its one publish."""
