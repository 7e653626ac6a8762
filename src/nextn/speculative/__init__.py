"""Speculative sampling as pure functions: how long to draft, from which vocabulary, and what to accept."""
