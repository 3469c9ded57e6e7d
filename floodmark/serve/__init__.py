"""The lake over HTTP for programs and people, and the daemon that runs it."""
