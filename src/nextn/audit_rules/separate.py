"""Check a head in a checkpoint of its own: in itself, beside its trunk, and by its own config.json.

A head whose layers have queries only says in its config.json which tensors it has, and their shapes.
"""

from collections.abc import Iterator, Mapping

from nextn.audit_rules.findings import Finding
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import key_sizes, misfits
from nextn.family_table import lookup_count
from nextn.text_format import counted, some

IDS = ("query-head", "draft-biases", "draft-trunk", "draft-sizes", "draft-quantized")
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
_Shape = tuple[int | None, ...]  # None: the config does not say


def query_head(inventory: Inventory) -> Iterator[Finding]:
    """Report missing tensors, those of other shapes, and those that such a head does not have."""
    if not inventory.family.trunk_kv:
        return
    expected, path = expected_shapes(inventory), inventory.checkpoint.path
    source = f"the published {' or '.join(inventory.family.models[:2])}, or the one of this trunk's size"
    fix = f"Download {path} again: {source}."
    if missing := sorted(inventory.published(name) for name in expected.keys() - inventory.stored.keys()):
        yield Finding(
            "query-head", "error", missing[0], f"{counted(len(missing), 'tensor')} absent: {some(missing)}.",
            "Every tensor of the layers, projections and lm_head that config.json describes.", fix,
        )  # fmt: skip
    if more := sorted(inventory.spellings(inventory.stored.keys() - expected.keys())):
        yield Finding(
            "query-head", "error", more[0], f"{counted(len(more), 'tensor')} that it does not have: {some(more)}.",
            "Layers with queries only, as many as num_hidden_layers says.", fix,
        )  # fmt: skip
    for canonical in sorted(expected.keys() & inventory.stored.keys()):
        info, shape = inventory.info(canonical), expected[canonical]
        sizes = zip(shape, info.shape, strict=False)
        if len(shape) != len(info.shape) or any(expected_size not in (None, size) for expected_size, size in sizes):
            valid = f"[{', '.join('?' if each is None else str(each) for each in shape)}], by its config.json."
            yield Finding("query-head", "error", info.name, f"{info.name} is {list(info.shape)}.", valid, fix)


def expected_shapes(inventory: Inventory) -> dict[str, _Shape]:
    """Return canonical name -> shape of every tensor that the head has by its config.json."""
    config = inventory.checkpoint.config
    sizes = {name: lookup_count(config, name) for name in ("hidden_size", "backbone_hidden_size", "vocab_size")}
    hidden, outer, vocabulary = sizes.values()
    double = None if outer is None else 2 * outer
    shapes: dict[str, _Shape] = {
        "projection.weight": (hidden, double), "next_projection.weight": (outer, hidden),
        "final_norm.weight": (hidden,), "output.weight": (vocabulary, hidden),
    }  # fmt: skip
    if "centroids" in inventory.family.names:
        shapes |= {"centroids.weight": (lookup_count(config, "num_centroids"), hidden), "token_ordering": (vocabulary,)}
    for index in range(inventory.num_layers):
        shapes |= {f"block.{index}.{name}": shape for name, shape in _layer(config, index, hidden).items()}
    return {f"0.{name}": shape for name, shape in shapes.items()}


def _layer(config: Mapping[str, object], index: int, hidden: int | None) -> dict[str, _Shape]:
    inner, heads = lookup_count(config, "intermediate_size"), lookup_count(config, "num_attention_heads")
    _, width = key_sizes(config, index)
    rows = None if heads is None or width is None else heads * width
    return {
        **dict.fromkeys([f"{name}_layernorm.weight" for name in _NORMS], (hidden,)),
        "self_attn.q_proj.weight": (rows, hidden), "self_attn.o_proj.weight": (hidden, rows),
        "self_attn.q_norm.weight": (width,), "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner), "layer_scalar": (1,),
    }  # fmt: skip


def separate(inventory: Inventory, *, trunk: Inventory | None = None) -> Iterator[Finding]:
    """Report each misfit: a warning if only some of the engines have it, a note if none has."""
    if inventory.layers:
        return  # not a head alone
    for each in misfits(inventory, trunk):
        severity = "error" if "sglang" in each.engines else "warning" if each.engines else "note"
        yield Finding(each.rule, severity, each.place, each.found, each.valid, each.fix)  # type: ignore[arg-type]


RULES = (query_head, separate)
