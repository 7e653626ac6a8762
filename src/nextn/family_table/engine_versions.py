"""The engines, and their versions: those whose code was read, and those that were run on CPUs."""

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers", "llama.cpp": "llama.cpp"}
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23", "transformers": "5.23.0", "llama.cpp": "0c1e57098"}  # read
RUN = {"vllm": "0.32.0", "transformers": "5.23.0", "llama.cpp": "0c1e57098"}  # see docs/benchmarks/engines.md


def named(engine: str) -> str:
    """Return the engine's name with the version that was read, such as vLLM 0.33.0."""
    return f"{NAMES[engine]} {VERSIONS[engine]}"
