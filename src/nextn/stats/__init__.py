"""Statistics from counts: acceptance, confidence intervals, expected speedups, and their plots."""
