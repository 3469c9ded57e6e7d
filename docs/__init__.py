"""The documentation, and the script that writes its generated page (docs/generate.py)."""
