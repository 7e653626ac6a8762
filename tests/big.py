"""A checkpoint of many shards and terabytes that takes megabytes: headers, and zeros for data.

Layout and names are DeepSeek-V3's, with as many experts as the number of tensors asks for. Knows no server.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from nextn.checkpoint.checkpoint import INDEX
from nextn.checkpoint.safetensors_file import RawTensor, _layout

H, V, INNER, LAYERS, RANK = 7168, 129280, 2048, 61, 1536


class Sparse:
    """Bytes: a header, then zeros up to `size`; `given` counts what was taken of them."""

    def __init__(self, header: bytes, size: int) -> None:
        self.header, self.size, self.given = header, size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self.size)
        data = self.header[begin:end]
        data += bytes(end - begin - len(data))
        self.given += len(data)
        return data


def layer(experts: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Path, dtype and shape of the tensors of one layer."""
    yield from ((f"{each}_layernorm.weight", "BF16", (H,)) for each in ("input", "post_attention"))
    yield "mlp.gate.weight", "BF16", (experts, H)
    yield "mlp.gate.e_score_correction_bias", "F32", (experts,)
    yield from fp8("self_attn.o_proj", (H, H))
    for expert in range(experts):
        yield from fp8(f"mlp.experts.{expert}.gate_proj", (INNER, H))
        yield from fp8(f"mlp.experts.{expert}.up_proj", (INNER, H))
        yield from fp8(f"mlp.experts.{expert}.down_proj", (H, INNER))


def fp8(path: str, shape: tuple[int, int]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield f"{path}.weight", "F8_E4M3", shape
    yield f"{path}.weight_scale_inv", "F32", (shape[0] // 128, shape[1] // 128)


def tensors(experts: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", "BF16", (V, H)
    yield "lm_head.weight", "BF16", (V, H)
    yield "model.norm.weight", "BF16", (H,)
    for index in range(LAYERS + 1):
        yield from ((f"model.layers.{index}.{path}", dtype, shape) for path, dtype, shape in layer(experts))
    for path, shape in {
        "enorm": (H,), "hnorm": (H,), "shared_head.norm": (H,), "eh_proj": (H, 2 * H), "embed_tokens": (V, H),
        "shared_head.head": (V, H),
    }.items():  # fmt: skip
        yield f"model.layers.{LAYERS}.{path}.weight", "BF16", shape


def big(shards: int, each: int = 1000) -> dict[str, bytes | Sparse]:
    """File name -> content, of `shards` shards that hold at least `each` tensors."""
    experts = -(-shards * each // (LAYERS + 1) // 6)
    table = {name: RawTensor(dtype, shape, b"") for name, dtype, shape in tensors(experts)}
    files: dict[str, bytes | Sparse] = {}
    index: dict[str, str] = {}
    names = list(table)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:06d}.safetensors"
        part = {name: table[name] for name in names[shard * len(names) // shards : (shard + 1) * len(names) // shards]}
        ends, header = _layout(part, None)
        files[file] = Sparse(len(header).to_bytes(8, "little") + header, 8 + len(header) + max(ends.values()))
        index |= dict.fromkeys(part, file)
    config = {"model_type": "deepseek_v3", "num_hidden_layers": LAYERS, "hidden_size": H, "vocab_size": V,
              "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
              "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}  # fmt: skip
    vocab = {f"token-{number:06d}": number for number in range(V)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": [f"t {number}" for number in range(V)]}}
    contents = {"config.json": config, "tokenizer.json": tokenizer, INDEX: {"metadata": {}, "weight_map": index}}
    return files | {file: json.dumps(content).encode() for file, content in contents.items()}


def write(folder: Path, files: dict[str, bytes | Sparse]) -> None:
    """The same on disk, as sparse files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with (folder / name).open("wb") as file:
            file.write(content.header if isinstance(content, Sparse) else content)
            file.truncate(len(content))
