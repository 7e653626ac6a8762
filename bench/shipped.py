"""Make the checkpoint that comes with the package from a run of the recipe `tiny`, with its model card and prompts.

    nextn train runs/tiny --recipe tiny
    python bench/shipped.py runs/tiny

The weights are stored in bfloat16. The prompts are random excerpts of held-out files; those whose greedy text is
repetitive are left out and counted in the card.
"""

import argparse
import json
import platform
from pathlib import Path
from string import Template

import torch

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.checkpoint.provenance import record_training
from nextn.data.corpus import Corpus
from nextn.data.sources import load_corpora
from nextn.demo import DecodedPair, decode_model
from nextn.model.model import Model
from nextn.train.metrics import bits
from nextn.train.recipes import held_out_prompts

TEXTS = Path(__file__).with_name("shipped")  # the card's template and a license
COMMAND = "nextn train runs/tiny --recipe tiny"
NUM_PROMPTS, NUM_TRIED, K = 24, 90, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args()
    model = Model.load(args.run / "model", dtype=torch.bfloat16)
    assert model.tokenizer is not None
    corpus, held_out = load_corpora([], model.tokenizer)
    # Pieces of `encodings`, tables of numbers, show nothing.
    prompts = [each for each in held_out_prompts(held_out, count=NUM_TRIED, seed=1) if bytes(each).count(b"0x") < 4]
    tried = decode_model(model, [prompt[:96] for prompt in prompts], num_speculative_tokens=K)
    steady = tried.greedy.non_degenerate[:NUM_PROMPTS]
    selected = DecodedPair(tried.greedy.plain.select(steady), tried.greedy.mtp.select(steady))
    sampled = DecodedPair(tried.sampled.plain.select(steady), tried.sampled.mtp.select(steady))
    assert selected.plain.tokens == selected.mtp.tokens
    card = Template((TEXTS / "card.md").read_text()).substitute(
        figures(args.run, model, corpus, held_out)
        | {
            "num_prompts": len(steady),
            "num_tried": len(prompts),
            "repetitive": len(prompts) - len(tried.greedy.non_degenerate),
        }
        | {
            "command": COMMAND,
            "greedy": row(selected),
            "sampled": row(sampled),
            "size": f"{2 * num_parameters(model) / 1e6:.1f} MB",
        }
    )

    def extra(folder: Path) -> None:
        record_training(folder, source=COMMAND)
        lines = [json.dumps({"prompt": prompts[index], "domain": "held-out"}) for index in steady]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "README.md").write_text(card)
        (folder / "LICENSE-PYTHON").write_text((TEXTS / "LICENSE-PYTHON").read_text())

    model.save(args.out, extra=extra)
    print(card)


def figures(run: Path, model: Model, corpus: Corpus, held_out: Corpus) -> dict[str, object]:
    """What the card says of the training: its settings, its text, and its last evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    forced = [line["forced"] for line in lines if "forced" in line][-1]
    last = [line for line in lines if "lr" in line][-1]
    return {
        "parameters": f"{num_parameters(model):,}",
        "steps": f"{last['step']:,}",
        "tokens": f"{last['tokens'] / 1e6:.1f} million",
        "python": platform.python_version(),
        "train_mb": f"{corpus.num_tokens / 1e6:.1f}",
        "held_mb": f"{held_out.num_tokens / 1e6:.2f}",
        "held_files": len(held_out.names),
        "bits": f"{bits(forced['loss'][0]):.2f}",
        "match": ", ".join(f"{rate:.3f}" for rate in forced["match"]),
        "overlap": ", ".join(f"{rate:.3f}" for rate in forced["overlap"]),
    }


def row(pair: DecodedPair) -> str:
    acceptance = pair.mtp.acceptance
    return f"{acceptance.length:.2f} | {' | '.join(f'{rate:.3f}' for rate in acceptance.rates)}"


def num_parameters(model: Model) -> int:
    assert model.head is not None
    return sum(value.numel() for part in (model.trunk.model, model.head) for value in part.parameters())


if __name__ == "__main__":
    main()
