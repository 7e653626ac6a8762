"""Synthetic checkpoints in published layouts, written without torch: what audit, restore and convert are tested on.

Values are random normal numbers (norm gains near 1, or near 0 where the family stores w for 1 + w), seeded by tensor
name: the same name has the same values in two artifacts of one seed. Shapes are tiny and agree with config.json.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from nextn.checkpoint import RawTensor, write_index, write_json, write_safetensors
from nextn.families import by_name

H, V, LAYERS, HEADS, KV, DIM, EXPERTS, INNER = 32, 64, 2, 4, 2, 8, 4, 16

Shapes = dict[str, tuple[int, ...]]


def gqa(*, bias: bool = False, norms: bool = False, gate: int = 1) -> Shapes:
    """Grouped-query attention; gate = 2 where q_proj makes the output gate, too (Qwen3-Next and later)."""
    shapes: Shapes = {
        "self_attn.q_proj.weight": (gate * HEADS * DIM, H),
        "self_attn.k_proj.weight": (KV * DIM, H),
        "self_attn.v_proj.weight": (KV * DIM, H),
        "self_attn.o_proj.weight": (H, HEADS * DIM),
    }
    if bias:
        shapes |= {f"self_attn.{each}_proj.bias": (shapes[f"self_attn.{each}_proj.weight"][0],) for each in "qkv"}
    if norms:
        shapes |= {"self_attn.q_norm.weight": (DIM,), "self_attn.k_norm.weight": (DIM,)}
    return shapes


def mla() -> Shapes:
    """Multi-head latent attention (DeepSeek-V2, section 2.1)."""
    return {
        "self_attn.q_a_proj.weight": (16, H),
        "self_attn.q_a_layernorm.weight": (16,),
        "self_attn.q_b_proj.weight": (HEADS * 16, 16),
        "self_attn.kv_a_proj_with_mqa.weight": (16 + 8, H),
        "self_attn.kv_a_layernorm.weight": (16,),
        "self_attn.kv_b_proj.weight": (HEADS * 16, 16),
        "self_attn.o_proj.weight": (H, HEADS * 8),
    }


def dense(inner: int = 2 * H) -> Shapes:
    return {
        "mlp.gate_proj.weight": (inner, H),
        "mlp.up_proj.weight": (inner, H),
        "mlp.down_proj.weight": (H, inner),
    }


def moe(*, bias: str = "mlp.gate.e_score_correction_bias", shared: str = "mlp.shared_experts") -> Shapes:
    """Experts one by one, a router, an optional correction bias and an optional shared expert."""
    one = {"gate_proj.weight": (INNER, H), "up_proj.weight": (INNER, H), "down_proj.weight": (H, INNER)}
    shapes: Shapes = {"mlp.gate.weight": (EXPERTS, H)} | ({bias: (EXPERTS,)} if bias else {})
    shapes |= {f"mlp.experts.{index}.{part}": shape for index in range(EXPERTS) for part, shape in one.items()}
    return shapes | ({f"{shared}.{part}": shape for part, shape in one.items()} if shared else {})


NORMS: Shapes = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
_SIZES = {
    "vocab_size": V, "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": DIM, "intermediate_size": 2 * H, "moe_intermediate_size": INNER,
}  # fmt: skip

# family -> (config, published tensors of one trunk layer, of one block of the head if they differ)
LAYOUTS: dict[str, tuple[dict[str, object], Shapes, Shapes | None]] = {
    "deepseek_v3": ({"model_type": "deepseek_v3", "n_routed_experts": EXPERTS}, NORMS | mla() | moe(), None),
    "glm4_moe": ({"model_type": "glm4_moe", "n_routed_experts": EXPERTS}, NORMS | gqa(bias=True) | moe(), None),
    "qwen3_5": ({"model_type": "qwen3_5_text"}, NORMS | gqa(norms=True, gate=2) | dense(), None),
    "step3p5": ({"model_type": "step3p5"}, NORMS | gqa(norms=True) | dense(), None),
}


def tensors(name: str, *, modules: int = 1, copies: bool = True) -> Shapes:
    """Published name -> shape of every tensor of the family's tiny checkpoint; copies as `publish` takes it."""
    family = by_name(name)
    _, layer, block = LAYOUTS[name]
    root = family.trunk["embedding"].rpartition(".")[0]
    root = f"{root}." if root else ""
    shapes: Shapes = {f"{path}.weight": (V, H) for path in family.trunk.values()} | {f"{root}norm.weight": (H,)}
    shapes |= {f"{root}layers.{index}.{path}": shape for index in range(LAYERS) for path, shape in layer.items()}
    for index in range(modules):
        for path, shape in _module(name, copies).items():
            shapes[family.published(f"{index}.{path}", LAYERS)] = shape
        for path, shape in (layer if block is None else block).items():
            stem = family.names["block"].format(module=index, layer=LAYERS + index)
            shapes[f"{stem}.{path}"] = shape
    return shapes


def _module(name: str, copies: bool) -> Shapes:
    """Canonical `<role>.weight` -> shape, without the block."""
    family = by_name(name)
    wide = {"projection": (H, 2 * H), "token_projection": (H, H), "hidden_projection": (H, H)}
    shapes: Shapes = {}
    for role in family.names:
        if role == "block" or (role in family.copies and not copies):
            continue
        shapes[f"{role}.weight"] = wide.get(role, (V, H) if role in ("embedding", "output") else (H,))
    return shapes


def values(name: str, shape: tuple[int, ...], *, gain: float, seed: int) -> np.ndarray:
    """fp32 values of one tensor, seeded by its name; `gain` is where norm gains lie."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    out = rng.standard_normal(shape).astype(np.float32)
    return gain + 0.1 * out if len(shape) == 1 else 0.1 * out


def bf16(array: np.ndarray) -> bytes:
    """Round to nearest even, as torch does."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def publish(
    folder: Path,
    name: str,
    *,
    modules: int = 1,
    copies: bool = True,
    shards: int = 1,
    dtype: str = "BF16",
    seed: int = 0,
    config: Mapping[str, object] = {},
    change: Callable[[dict[str, RawTensor]], None] | None = None,
) -> Path:
    """Write the family's tiny checkpoint into `folder` -> folder.

    copies: embedding and output head again inside each module, equal to the trunk's, where the family stores them so.
    shards: how many files; more than one comes with an index. config: keys over the family's. change: edits the table
    of tensors before it is written (drop, rename, replace).
    """
    family = by_name(name)
    gain = 0.0 if family.gain == "1+w" else 1.0
    table: dict[str, RawTensor] = {}
    for each, shape in tensors(name, modules=modules, copies=copies).items():
        same = _original(name, each)
        data = values(same, shape, gain=gain, seed=seed)
        table[each] = RawTensor(dtype, shape, bf16(data) if dtype == "BF16" else data.astype("<f4").tobytes())
    if change is not None:
        change(table)
    settings = _SIZES | LAYOUTS[name][0]
    write_json(folder / "config.json", family.with_count(settings, modules) | dict(config))
    write(folder, table, shards=shards)
    return folder


def _original(name: str, tensor: str) -> str:
    """A copy has the values of the trunk's tensor."""
    family = by_name(name)
    canonical = family.canonical(tensor, LAYERS)
    role = canonical.split(".")[1] if canonical else ""
    return f"{family.trunk[role]}.weight" if role in family.copies else tensor


def write(folder: Path, table: Mapping[str, RawTensor], *, shards: int = 1) -> None:
    """Put `table` into one file, or into `shards` files with an index; consecutive names share a file."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", table, metadata={"format": "pt"})
        return
    files = {name: f"model-{1 + place * shards // len(table):05d}-of-{shards:05d}.safetensors"
             for place, name in enumerate(table)}  # fmt: skip
    for file in sorted(set(files.values())):
        write_safetensors(folder / file, {name: table[name] for name in table if files[name] == file})
    write_index(folder, files, sum(len(each.data) for each in table.values()))


def load_json(path: Path) -> dict:
    return json.loads(path.read_text())
