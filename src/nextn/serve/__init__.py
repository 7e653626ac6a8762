"""An OpenAI-compatible server: continuous batching over draft-and-verify rounds, a prefix cache, an API and a page."""
