"""Recovery: finish or undo what a dead process left, before anything else is done."""
