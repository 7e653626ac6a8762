"""The vectorized head against a Python loop over positions, as tutorials write it, at T = 512.

The loop runs the same MTP layers one position at a time on a growing prefix without a cache, so that it computes the
same; only some positions are timed, and the time is scaled up. `python bench/head.py --out head.json`.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from record import write_record

from nextn.model.standalone_head import StandaloneHead


def loop(head: StandaloneHead, tokens: torch.Tensor, positions: list[int], depths: int) -> list[torch.Tensor]:
    """Logits [B, D, V] of some positions, each from its own prefix."""
    hidden, out = head.embedding(tokens), []
    for position in positions:
        states, logits = hidden[:, : position + 1], []
        for depth in range(1, depths + 1):
            step = head.step(head.layer_index(depth), tokens[:, depth : position + 1 + depth], states)
            logits.append(head.logits(head.layer_index(depth), step.final_hidden[:, -1]))
            states = step.next_hidden
        out.append(torch.stack(logits, 1))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    head, depths, length = StandaloneHead(1000, 256, num_modules=3), 3, 512
    tokens = torch.randint(0, 1000, (1, length))
    positions = list(range(0, length - depths, 16))
    with torch.inference_mode():
        logits, slow = head(tokens), loop(head, tokens, positions, depths)
        gap = max((logits[:, position] - one).abs().max().item() for position, one in zip(positions, slow, strict=True))
        fast_s, loop_s = [], []
        for _ in range(5):
            started = time.perf_counter()
            head(tokens)
            fast_s.append(time.perf_counter() - started)
            started = time.perf_counter()
            loop(head, tokens, positions, depths)
            loop_s.append((time.perf_counter() - started) * (length - depths) / len(positions))
    record = {"fast_s": statistics.median(fast_s), "loop_s": statistics.median(loop_s), "largest_difference": gap}
    record["ratio"] = record["loop_s"] / record["fast_s"]
    print("  ".join(f"{key} {value:.3g}" for key, value in record.items()))
    write_record(args.out, record)


if __name__ == "__main__":
    main()
