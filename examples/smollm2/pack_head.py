"""Store a trained head in bfloat16, as the package has it: head.safetensors and config.json.

python examples/smollm2/pack_head.py RUN/head OUT
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with safe_open(options.head / "head.safetensors", framework="pt") as file:
        metadata = file.metadata() | {"source": "examples/smollm2", "trunk": "SmolLM2-135M-Instruct"}
        tensors = {name: file.get_tensor(name).to(torch.bfloat16) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, options.out / "head.safetensors", metadata=metadata)
    shutil.copyfile(options.head / "config.json", options.out / "config.json")
    print(f"{options.out}: {sum(value.nbytes for value in tensors.values()):,} bytes")


if __name__ == "__main__":
    main()
