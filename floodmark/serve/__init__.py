"""The lake for programs and people that ask it over HTTP, and the daemon that runs it."""
