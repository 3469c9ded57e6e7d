"""Table health: compaction, retention, expiry, sweep; each with a named outcome."""
