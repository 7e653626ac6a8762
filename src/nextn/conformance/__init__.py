"""The conformance kit: a tiny trained checkpoint with what an engine must count on it, and the check of an engine."""
