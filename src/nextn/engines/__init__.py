"""Clients of OpenAI-compatible inference engines, and their speculative-decoding counters. Imports no torch."""
