"""Live engines behind one door: OpenAI-compatible servers, and what they count of their drafts. Imports no torch."""
