"""Measurements of a model: decoding costs and speed, reference acceptance of its head, and diagnosis of engines."""
