"""Writes: plan, stage, seal and publish."""
