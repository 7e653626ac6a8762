"""Several processes: which of them does what, and who holds which part."""
