"""The table of commands: where each is, what it does in a line, its two commonest calls, and its page."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command. `summary` has at most 64 characters, so that `nextn --help` has a line for each."""

    module: str  # in this folder
    page: str  # of the documentation
    summary: str
    calls: tuple[str, str]


GROUPS = {"canary": "Check an engine's counters with a tiny trained checkpoint"}
# Panel of the help -> command, also of a group.
COMMANDS: dict[str, dict[str, Command]] = {
    "Check": {
        "audit": Command("audit", "reference/checkpoints", "Check a checkpoint's MTP head, without downloading weights",
                         ("MODEL", "TRUNK --head HEAD")),
        "measure": Command("measure", "reference/measure", "Measure the acceptance that the head should reach",
                           ("MODEL --prompts FILE", "TUNED --against BASE --prompts FILE")),
        "accuracy": Command("accuracy", "reference/bench", "Compare a model's distributions with those in float32",
                            ("MODEL", "MODEL --weights int8")),
        "env": Command("lookup", "tutorials/first-hour", "Report versions, processor, memory, GPUs and the backend",
                       ("", "--json")),
        "families": Command("lookup", "reference/families/index", "List the published models whose heads are known",
                            ("", "NAME")),
    },
    "Fix": {
        "restore": Command("edit", "reference/checkpoints", "Restore a lost head, byte for byte",
                           ("TUNED --from BASE", "TUNED --from BASE --dry-run")),
        "convert": Command("edit", "reference/checkpoints", "Convert a head between layouts and files, or a GGUF file",
                           ("MODEL OUT --form single-file", "MODEL --reindex")),
        "extract": Command("edit", "reference/checkpoints", "Write the head alone to one file",
                           ("MODEL head.safetensors", "MODEL head.safetensors --json")),
        "quantize": Command("edit", "how-to/quantize", "Write a model with decoder layers of 4 or 8 bits",
                            ("MODEL OUT --weights int8", "MODEL OUT --weights q4_1 --calibrate")),
    },
    "Train": {
        "train": Command("train", "reference/training", "Train a head for a model, or trunk and head from scratch",
                         ("RUN --from MODEL --freeze-trunk --init-head --data FILE", "RUN --resume")),
        "answer": Command("answer", "reference/training-data", "Generate training data with the trunk or an engine",
                          ("MODEL OUT.jsonl --prompts FILE", "MODEL OUT.jsonl --prompts FILE --engine HOST:PORT")),
    },
    "Decode": {
        "generate": Command("decode", "reference/settings", "Decode one prompt with MTP", 
                            ("MODEL PROMPT", "MODEL PROMPT -k 3 --adaptive")),
        "chat": Command("chat", "tutorials/chat-in-the-browser", "Chat with a model in the terminal",
                        ("MODEL", "MODEL --head HEAD")),
        "serve": Command("serve", "reference/server", "Serve a model: OpenAI's and Anthropic's API, and a page",
                         ("MODEL", "MODEL --print vllm")),
        "bench": Command("bench", "reference/bench", "Measure plain and MTP decoding over K: speed, AL, costs, memory",
                         ("MODEL --prompts FILE", "MODEL --prompts FILE -k 0,2,4")),
        "advise": Command("bench", "reference/bench", "Say whether MTP pays off on this machine, and the best K",
                          ("MODEL --prompts FILE", "--engine HOST:PORT --against HOST:PORT")),
    },
    "Engines": {
        "adopt": Command("edit", "how-to/any-model", "Write a Llama, Mistral or Qwen with a head in GLM's layout",
                         ("MODEL OUT", "MODEL OUT --head HEAD")),
        "export": Command("export", "how-to/any-model", "Write a head that was added to a model for an engine",
                          ("HEAD OUT --model MODEL --for vllm --adopt", "HEAD OUT.gguf --model MODEL --for llama.cpp")),
        "push": Command("export", "how-to/publish", "Upload a checkpoint to a hub, with a model card",
                        ("FOLDER ORG/NAME --dry-run", "FOLDER ORG/NAME --measured measure.json")),
        "verify": Command("engines", "reference/verify", "Check that a server's output is the same with MTP on and off",
                          ("HOST:PORT --against HOST:PORT", "HOST:PORT --check greedy --against HOST:PORT")),
        "diagnose": Command("diagnose", "reference/diagnose", "Name the causes of an engine's low acceptance",
                            ("MODEL --engine HOST:PORT --drive", "--engine engine.log")),
        "canary build": Command("engines", "reference/contract", "Train a tiny checkpoint for an engine's tests",
                                ("OUT --family glm4_moe", "OUT --family qwen3_5")),
        "canary check": Command("engines", "reference/contract", "Check an engine against the contract",
                                ("FOLDER --engine HOST:PORT", "FOLDER --answers FILE --counters FILE")),
    },
    "Learn": {
        "demo": Command("learn", "tutorials/first-hour", "Decode a published model with MTP, and train a head for it",
                        ("", "--minutes 0")),
        "trace": Command("decode", "explanation/alignment", "Show which token and state are at which position",
                         ("MODEL PROMPT", "MODEL PROMPT -k 3")),
        "docs": Command("lookup", "index", "Show a page of the documentation, or list all", ("", "low-acceptance")),
    },
}  # fmt: skip
