"""Segments of key and value indexes: the hash of each value, and where its rows are; docs/index-format.md.

What a segment says is a hint: rows that are not live any more, and other values with the same hash, are among its
candidates, so whoever asks verifies rows. But a row of a covered file is never missing, and damage is noticed.
"""
