"""Writes: plan, stage, seal, and through the door."""
