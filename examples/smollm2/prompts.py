"""Write prompts for training a head of a small instruct model: instructions of 16 kinds, Python functions to complete.

    python examples/smollm2/prompts.py OUT --packages numpy torch transformers --shards 8

writes OUT/prompts-1.jsonl ... prompts-8.jsonl, and OUT/chat-heldout.jsonl, whose topics and tasks appear together in
none of them. Functions are those of Python's standard library and of installed packages, with their docstrings.
HumanEval, which measures the head, has others.
"""

import argparse
import ast
import itertools
import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from nextn.data.corpus import standard_library

MAX_CHARACTERS = 700  # of a function's header
HELD_OUT = 80
TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "the French Revolution", "how vaccines work", "inflation",
    "plate tectonics", "the Roman Empire", "how a bicycle stays upright", "electric cars", "recursion", "coral reefs",
    "healthy breakfasts", "learning to play the guitar", "public libraries", "a lighthouse keeper", "time zones",
    "renewable energy", "the moon landing", "how bread rises", "chess openings", "remote work", "city parks",
    "volcanoes",
    "the printing press", "honey bees", "saving money", "a lost dog", "whales", "the Silk Road", "machine learning",
    "good sleep", "how airplanes fly", "jazz music", "gardening in small spaces", "the immune system", "democracy",
    "deserts", "a train journey at night", "writing a resume", "rainbows", "databases", "the stock market", "tea",
    "sorting algorithms", "Leonardo da Vinci", "ocean tides", "meditation", "the history of computers", "an old clock",
    "stars", "public speaking", "earthquakes", "Japanese cuisine", "how magnets work", "the Great Wall of China",
    "working in teams", "penguins", "the human heart", "a rainy day in Paris", "photography", "unit tests", "glaciers",
    "the Olympic Games", "DNA", "travel on a budget", "antibiotics", "a robot that learns to paint", "hash tables",
    "owls",
    "the Amazon rainforest", "the periodic table", "interviews", "solar eclipses", "running a marathon", "the internet",
)  # fmt: skip
KINDS = (
    "Explain {} to a ten-year-old.", "Write a short story about {}.", "Write a short poem about {}.",
    "List five interesting facts about {}.", "What are the advantages and disadvantages of {}?",
    "Write an email to a colleague about {}.", "Write three quiz questions with answers about {}.",
    "Summarize what is known about {} in one paragraph.", "Give me step-by-step advice on {}.",
    "Write a dialogue between a teacher and a student about {}.", "What is {}?", "Why does {} matter today?",
    "Make a table with key terms about {} and what they mean.", "Write an introduction to an essay about {}.",
    "Which common mistakes do people make about {}?", "Compare {} with something similar.",
)  # fmt: skip
STYLES = ("", " Keep it short.", " Use simple words.", " Give an example.")
CODE_KINDS = (
    "Complete this Python function:\n\n```python\n{}\n```",
    "Write a Python function with this signature and docstring. Reply with the code.\n\n{}",
    "{}",
    "Implement the following function and explain how it works.\n\n```python\n{}\n```",
)


def sources(packages: list[str]) -> Iterator[Path]:
    yield from standard_library()
    for name in packages:
        spec = find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from sorted(Path(folder).rglob("*.py"))


def functions(packages: list[str]) -> Iterator[str]:
    """Headers of functions with docstrings of at least a sentence."""
    for path in sources(packages):
        try:
            tree = ast.parse(path.read_text(errors="replace"))
        except SyntaxError:  # of a newer Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(ast.get_docstring(node) or "") > 60:
                header = f"def {node.name}({ast.unparse(node.args)}):"
                text = f'{header}\n    """{ast.get_docstring(node)}"""'.replace("\n\n", "\n")
                if len(text) <= MAX_CHARACTERS and '"""' not in (ast.get_docstring(node) or ""):
                    yield text


def write(path: Path, prompts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    print(f"{path}: {len(prompts):,} prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", nargs="*", default=[], help="installed packages whose functions are added")
    parser.add_argument("--count", type=int, default=10**6, help="prompts at most")
    parser.add_argument("--shards", type=int, default=1, help="files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shuffled = random.Random(0)
    headers = sorted(set(functions(options.packages)))
    tasks = [kind.format(topic) for kind in KINDS for topic in TOPICS]
    shuffled.shuffle(tasks)
    write(options.out / "chat-heldout.jsonl", tasks[:HELD_OUT])
    prompts = [kind.format(header) for header, kind in itertools.product(headers, CODE_KINDS)]
    prompts += [task + style for task, style in itertools.product(tasks[HELD_OUT:], STYLES)]
    shuffled.shuffle(prompts)
    for index in range(options.shards):
        write(options.out / f"prompts-{index + 1}.jsonl", prompts[: options.count][index :: options.shards])


if __name__ == "__main__":
    main()
