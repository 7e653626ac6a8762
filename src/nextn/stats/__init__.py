"""Statistics from counts: acceptance, confidence intervals, expected speed-ups, and their plots."""
