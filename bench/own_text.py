"""A model's own answers to prompts from a text, and the acceptance of heads on them: what benchmarks of heads share."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nextn.data.batches import Batch, Batches, sample_prompts
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, standard_library
from nextn.data.sources import load_corpora, path_hashes, split_by_hash
from nextn.model.model import Model
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.settings import Sampling, Settings
from nextn.train.loop import Trainer
from nextn.train.self_generated import generate_answers


def python_corpora(num_files: int | None = None) -> tuple[Corpus, Corpus]:
    """Return (train, held out) of the sources of Python's standard library, without the prose."""
    paths = [path for path in standard_library()[:num_files] if path not in _prose()]
    train, held_out = split_by_hash(paths, path_hashes(paths), held_out=0.05)
    return Corpus.from_files(train, byte_tokenizer()), Corpus.from_files(held_out, byte_tokenizer())


def prose_corpora() -> tuple[Corpus, Corpus]:
    """Return (train, held out) of the prose of Python's documentation, which `pydoc` carries."""
    return load_corpora(_prose(), byte_tokenizer())


def _prose() -> list[Path]:
    return [path for path in standard_library() if path.parent.name == "pydoc_data" and path.name != "__init__.py"]


def write_answers(
    model: Model, corpus: Corpus, file: Path, *, count: int, prompt_tokens: int, max_tokens: int, greedy: bool = False
) -> Path:
    """Let the trunk answer `count` prompts from the corpus, without drafts. A complete file is left as it is."""
    prompts = [each.tolist() for each in sample_prompts(corpus, count=count, length=prompt_tokens, seed=1)]
    sampling = Sampling(float(not greedy))
    settings = Settings(num_speculative_tokens=0, sampling=sampling, max_tokens=max_tokens, eos=(), seed=2)
    for progress in generate_answers(replace(model, head=None, backends={}), prompts, settings, file, batch_size=32):
        print(f"  {file.name}: {progress.answers} of {progress.total}", end="\r", flush=True)
    return file


def read_answers(file: Path) -> Corpus:
    """Return all answers of a file as a corpus, whose labels are what the model wrote."""
    first, second = load_corpora([file], byte_tokenizer(), held_out=0.01)
    if first is second:
        return first
    assert first.mask is not None
    assert second.mask is not None
    return replace(
        first,
        ids=np.concatenate([first.ids, second.ids]),
        starts=np.concatenate([first.starts, second.starts + first.num_tokens]),
        names=first.names + second.names,
        mask=np.concatenate([first.mask, second.mask]),
    )


def with_states(
    trunk: Trunk, corpus: Corpus, *, length: int, run: Callable[[Trunk, Batch], TrunkOutput] | None = None
) -> list[tuple[Batch, TrunkOutput]]:
    """Return batches of 8 rows that hold each text once, with the trunk's states, for `heldout_acceptance`.

    run: computes the states of a batch; None: as the trunk does.
    """
    batches = Batches(corpus, batch_size=8, length=length, seed=0, pack=False)
    parts = [batches.batch(index) for index in range(-(-batches.rows_per_epoch // 8))]
    with torch.no_grad():
        return [(part, run(trunk, part) if run else trunk(part.tokens, documents=part.documents)) for part in parts]


def run_steps(trainer: Trainer) -> float:
    """Train to the last step, from a checkpoint if there is one; return the CPU seconds of all threads."""
    started = time.process_time()  # other load on the machine does not count
    trainer.resume()
    for record in trainer.run():
        print(f"  {trainer.folder.path.name}: step {record.step} of {trainer.config.steps}", end="\r", flush=True)
    return round(time.process_time() - started, 1)
