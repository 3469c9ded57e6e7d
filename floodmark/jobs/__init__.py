"""Long work in small steps: a run of a job, from its lease to its end."""
