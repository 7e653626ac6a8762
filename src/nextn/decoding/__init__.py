"""Decoding: drafts, rounds, streamed text."""
