"""Shipped for users who build on Floodmark: injected faults, stand-in servers, and contracts as executable suites."""
