"""Making a change true: the publication that every verb runs through, and recovery, which ends what a crash left."""
