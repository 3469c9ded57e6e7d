"""Ways out: sinks that ship each row once."""
