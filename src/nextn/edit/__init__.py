"""Heads between checkpoints: a plan first, then files."""
