"""Move heads between checkpoints: plan, then write."""
