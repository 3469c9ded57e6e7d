"""Table maintenance: compaction, retention, expiry, sweep; each with a named outcome."""
