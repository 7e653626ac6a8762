"""The backends that decode: `torch` and `native`."""
