"""The folders in which `make_outputs.py` runs the commands of the pages, made from the models under tests/fixtures.

The models have two or three layers and know 48 words; their files have a few hundred kB. The commands do with them
what they do with any checkpoint of the family.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from generated import ROOT

sys.path.insert(0, str(ROOT / "tests"))

import torch
from bpe_tokenizers import bpe_tokenizer
from decoding_engine import Server, faulty
from fake_engine import FakeEngine
from make_troubleshooting import head_not_left_out
from served import ServedModel
from test_separate_head import TEXT, build
from tiny import FIXTURES, refrain
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import nextn
from nextn.checkpoint.checkpoint import SHIPPED
from nextn.conformance.build import build_record
from nextn.conformance.record import FILE
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model

PORT = 8000  # as the pages show it; the server gets a free one
WORDS = [
    "ant",
    "bee",
    "cat",
    "dog",
    "elk",
    "fox",
    "gnu",
    "hen",
    "ibis",
    "jay",
    "kiwi",
    "lark",
    "mole",
    "newt",
    "owl",
    "pig",
    "quail",
    "ram",
    "seal",
    "toad",
    "urchin",
    "vole",
    "wasp",
    "yak",
    "zebra",
    "ape",
    "bat",
    "cod",
    "dove",
    "eel",
    "frog",
    "goat",
    "hare",
    "iguana",
    "jackal",
    "koala",
    "lion",
    "moose",
    "nandu",
    "orca",
    "puma",
    "rat",
    "shark",
    "tern",
    "unicorn",
    "viper",
    "wolf",
    ".",
]


@dataclass(frozen=True)
class Scene:
    """A folder with checkpoints, and a server if the page shows one."""

    name: str
    make: Callable[[Path], None]
    serve: Callable[[Path], FakeEngine | Server] | None = None
    slow: bool = False  # more than a few seconds: left out of the tests, run by `make docs`

    @contextmanager
    def prepare(self, folder: Path) -> Iterator[int]:
        """Make the folder; yield the port of the server, or 0."""
        self.make(folder)
        server = self.serve(folder) if self.serve else None
        try:
            yield server.server.server_port if server else 0
        finally:
            if server:
                server.stop()


def lost(folder: Path) -> None:
    """A fine-tune that transformers saved: the head is gone."""
    _base(folder, "qwen")
    AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(folder / "tuned")
    _tokenizer(folder / "tuned")


def lost_lightly_tuned(folder: Path) -> None:
    """The same of the checkpoint in the package, after a few steps on the built-in prompts; held-out prompts."""
    shipped(folder)
    (folder / "tiny").rename(folder / "base")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokens = torch.tensor(tokenizer.encode("\n\n".join(str(prompt.text) for prompt in read_prompts(None))))
    _fine_tune(model, tokens[: len(tokens) // 96 * 96].view(-1, 96), lr=2e-4)
    model.to(torch.bfloat16).save_pretrained(folder / "tuned")
    tokenizer.save_pretrained(folder / "tuned")


def shipped(folder: Path) -> None:
    """The checkpoint in the package, where its short path is its name, and held-out prompts."""
    shutil.copytree(SHIPPED, folder / "tiny")
    shutil.move(folder / "tiny" / "prompts.jsonl", folder / "prompts.jsonl")


def separate_head(folder: Path, layout: str) -> None:
    """A Llama without a head, and one in a layout for other engines that was trained on it for three steps."""
    build(folder / "MODEL", "llama")
    bpe_tokenizer("smollm").save_pretrained(folder / "MODEL")
    (folder / "text.txt").write_text(TEXT)
    command = ["train", "runs/head", "--freeze-trunk", "--from", "MODEL", "--init-head", "--layout", layout]
    nextn_command(folder, *command, "--data", "text.txt", "--set", "steps=3", "--set", "length=32", "--allow-worse")


def loaded(folder: Path) -> None:
    """A model with its head, and prompts."""
    _base(folder, "glm")


def quantized(folder: Path) -> None:
    """An fp8 model whose head was copied back in bf16, without telling the config."""
    _base(folder, "glm")
    head_not_left_out(folder / "base", folder / "model-fp8")


def stale(folder: Path) -> None:
    """A fine-tune on another language that kept the head of its base; prompts and questions in that language."""
    _base(folder, "glm")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    nextn.keep_head(model)
    _fine_tune(model, _staircases(4000, 48, seed=5), lr=2e-3)
    model.to(torch.bfloat16).save_pretrained(folder / "tuned")
    _tokenizer(folder / "tuned")
    _new_texts(folder)


def headless(folder: Path) -> None:
    """The same fine-tune as a model that never had a head."""
    stale(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    model.config.num_nextn_predict_layers = 0
    model.save_pretrained(folder / "bare")
    _tokenizer(folder / "bare")
    shutil.rmtree(folder / "tuned")


def examples(folder: Path) -> None:
    """The scripts of the repository."""
    shutil.copytree(ROOT / "examples", folder / "examples")


def bare(folder: Path) -> None:
    """A model without a head, and what it answered."""
    headless(folder)
    command = ["answer", "bare", "answers.jsonl", "--prompts", "questions.jsonl", "--temperature", "1"]
    nextn_command(folder, *command, "--max-tokens", "48", "--batch", "64")


def canary(folder: Path) -> None:
    """A canary made of a trained model: `nextn canary build` would train for minutes."""
    shutil.copytree(FIXTURES / "glm", folder / "canary-glm")
    record = build_record(folder / "canary-glm", refrain(16, 33, seed=10**6).tolist(), count=16, tokens=24)
    (folder / "canary-glm" / FILE).write_text(json.dumps(record))


def wrong_state_engine(folder: Path) -> Server:
    """An engine that passes the state before the head's norm on to the next draft step."""
    model = Model.load(folder / "canary-glm", dtype=torch.float32)
    injected = faulty(model, "wrong-next-hidden")
    assert injected is not None
    return Server(*injected)


def nextn_command(folder: Path, *words: str) -> None:
    settings = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "nextn", *words], cwd=folder, env=settings, check=True, capture_output=True)


def wrong_engine(folder: Path) -> FakeEngine:
    """An engine that emits a wrong token now and then where it has drafted."""
    return FakeEngine("wrong")


def norms_not_shifted(folder: Path) -> ServedModel:
    """An engine that reads norm weights as w where they are stored for 1 + w."""
    injected = faulty(Model.load(folder / "tiny", dtype=torch.float32), "norm-offset-missing")
    assert injected is not None
    model, contract = injected
    return ServedModel(model=model, contract=contract, num_speculative_tokens=3)


def _base(folder: Path, fixture: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shutil.copytree(FIXTURES / fixture, folder / "base")
    _tokenizer(folder / "base")
    _write_texts(folder / "prompts.txt", refrain(24, 24, seed=10**6))


def _tokenizer(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="."))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=".").save_pretrained(folder)


def _fine_tune(model: torch.nn.Module, rows: torch.Tensor, *, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in rows.split(8):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _new_texts(folder: Path) -> None:
    _write_texts(folder / "prompts.txt", _staircases(24, 24, seed=10**6))
    lines = (json.dumps({"text": _words(row)}) for row in _staircases(400, 16, seed=10**5).tolist())
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")


def _staircases(count: int, length: int, *, seed: int) -> torch.Tensor:
    """[count, length] rows that climb the list of words by a step of 1 to 7, which changes every 5 to 11 words."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows = []
    for _ in range(count):
        row = [number(0, 40)]
        while len(row) < length:
            step = number(1, 8)
            row += [(row[-1] + step * k) % 40 for k in range(1, number(6, 13))]
        rows.append(row[:length])
    return torch.tensor(rows)


def _write_texts(path: Path, rows: torch.Tensor) -> None:
    path.write_text("\n\n".join(map(_words, rows.tolist())) + "\n")


def _words(row: list[int]) -> str:
    return " ".join(WORDS[token] for token in row)


SCENES = (
    Scene("readme", lost),
    Scene("first-hour", shipped, slow=True),
    Scene("lost-head", lost_lightly_tuned, slow=True),
    Scene("low-acceptance", shipped, norms_not_shifted, slow=True),
    Scene("large-models", shipped, slow=True),
    Scene("any-model-draft", partial(separate_head, layout="mimo"), slow=True),
    Scene("any-model-gguf", partial(separate_head, layout="step35"), slow=True),
    Scene("serve", shipped),
    Scene("quantized", quantized),
    Scene("ci", stale, wrong_engine, slow=True),
    Scene("stale-head", stale, slow=True),
    Scene("new-head", bare, slow=True),
    Scene("train-a-head", headless, slow=True),
    Scene("engine-authors", canary, wrong_state_engine, slow=True),
    Scene("beside-fine-tune", examples, slow=True),
)
