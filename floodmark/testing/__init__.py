"""Shipped for whoever builds on Floodmark: faults on purpose, stand-in servers, and contracts as executable suites."""
