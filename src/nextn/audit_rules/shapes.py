"""Compare the head's shapes and experts with config.json and the trunk's layers, and the vocabulary sizes.

A block is of the trunk's own layer class, so the reference is the layer that resembles it most. Where none does, as in
families with a block of their own, nothing is reported.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping

from nextn.audit_rules.findings import Finding, Severity, restore
from nextn.audit_rules.layer_reference import LayerReference
from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.expert_counts import (
    declared_experts,
    head_experts,
    lost_experts,
    router_axis,
    trunk_experts,
    uniform,
    with_experts,
)
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.packed_layout import with_logical_weights
from nextn.checkpoint.quantization import split_name, unpacked
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.errors import CheckpointError
from nextn.family_table import lookup_count
from nextn.text_format import counted, joined, some

IDS = ("experts-pruned", "shape", "vocabulary")
TOKENIZER = "tokenizer.json"
_MLP = re.compile(r"(.*)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")
_HEADS_EXPERTS = re.compile(r"(?:mtp|nextn|draft).*expert|expert.*(?:mtp|nextn|draft)")  # a field of the config
_CODES = ("", ".weight", ".weight_packed", ".qweight")  # suffixes; parts beside them may differ in the scheme


def comparable(inventory: Inventory) -> Inventory:
    """Return the inventory for rules that compare the head's block with the trunk's layers: with as many experts."""
    counts = _pruned_apart(inventory)
    return inventory if counts is None else with_experts(inventory, min(counts))


def experts_pruned(inventory: Inventory) -> Iterator[Finding]:
    """Report a head whose block has another number of experts than the trunk's layers."""
    counts = _pruned_apart(inventory)
    if counts is None:
        return
    trunk, head = counts
    one, other = ("trunk", "head") if trunk < head else ("head", "trunk")
    path = shlex.quote(inventory.checkpoint.path)
    fields = declared_experts(inventory.checkpoint.config)
    declared = f"; config.json has {joined(f'{field} = {count}' for field, count in fields.items())}" if fields else ""
    again = f"`nextn train RUN --from {path} --freeze-trunk --init-head` trains a head for the trunk as it is"
    keep = f"`nextn convert {path} OUT --keep-experts LIST` keeps {trunk} of the head's experts, and the router's rows"
    yield Finding(
        "experts-pruned", "error", f"{CONFIG}: {next(iter(fields), 'num_experts')}",
        f"The trunk's layers have {trunk} experts, the head's block {head}{declared}: the {one} was pruned without the "
        f"{other}. Engines build both with one number, and fail to load or route to experts that are not there.",
        f"{trunk} experts in the head, too.",
        f"{keep}; or {again}." if one == "trunk"
        else f"`{restore(inventory, force=True)}`, from the model before it was pruned; or {again}.",
    )  # fmt: skip


def _pruned_apart(inventory: Inventory) -> tuple[int, int] | None:
    """Return the numbers of experts of trunk and head where these differ; None where they agree or are not known."""
    head = uniform(head_experts(inventory))
    if head is None or len(inventory.layers) < inventory.num_layers:
        return None
    trunk = uniform(trunk_experts(inventory))
    if inventory.family.own_block and not (trunk and head > trunk and _is_of_config(inventory, trunk)):
        return None  # such a block may have fewer
    # An incomplete head is another fault: what was pruned has as many rows in its router.
    routers = [router_axis(each, inventory.info(each), head) for each in inventory.stored]
    if trunk in (None, head) or set(routers) == {None} or any(lost_experts(inventory)):
        return None
    return trunk, head


def _is_of_config(inventory: Inventory, count: int) -> bool:
    """Whether the config's one number of experts is this, and it has none of the head's own."""
    config = inventory.checkpoint.config
    names = [*config, *(name for part in config.values() if isinstance(part, Mapping) for name in part)]
    return {*declared_experts(config).values()} == {count} and not any(_HEADS_EXPERTS.search(name) for name in names)


def shape(inventory: Inventory) -> Iterator[Finding]:
    """Report tensors of the head whose shape differs from the config's or from that of the trunk's layers."""
    inventory, reported = _of_logical_weights(inventory), set[str]()
    for finding, names in _empty(inventory):
        reported |= names
        yield finding
    for info, expected, because in (*_against_config(inventory), *_against_trunk(inventory)):
        if info.name in reported:  # for another expert in it
            continue
        reported.add(info.name)
        per_expert = " per expert" if info.form != inventory.checkpoint.tensors[info.name].form else ""
        swapped = len(info.shape) == 2 and str([*reversed(info.shape)]) == expected
        yield Finding(
            "shape", "error", info.name,
            f"{info.name} is {list(info.shape)}{per_expert}{', transposed' if swapped else ''}.",
            f"{expected}, {because}.",
            f"Run `{restore(inventory, force=True)}`, from a model of the same size.",
        )  # fmt: skip
    halves = [each for each in _unlike_down_proj(inventory) if each[0].name not in reported]
    for in_head in (True, False):
        infos = {info.name: size for info, size, own in halves if own is in_head}
        if infos:
            name, size = next(iter(infos.items()))
            yield Finding(
                "shape", "error", name,
                f"{counted(len(infos), 'projection')} of {'the head' if in_head else 'the trunk'}, such as {name} "
                f"{list(inventory.checkpoint.tensors[name].shape)}, of another intermediate size than the down_proj "
                "beside it.",
                f"A size of {size} beside the hidden size.",
                f"Run `{restore(inventory, force=True)}`." if in_head else "Download or save the trunk again.",
            )  # fmt: skip


def _empty(inventory: Inventory) -> Iterator[tuple[Finding, set[str]]]:
    """Report weights without values, and their names: as ZeRO-3 has those that no process gathered."""
    tensors, head = inventory.checkpoint.tensors, set(inventory.stored.values())
    names = [name for name, info in tensors.items() if tuple(info.shape) == (0,) and info.dtype.startswith(("BF", "F"))]
    if names:
        gather = "Save again with DeepSpeed's stage3_gather_16bit_weights_on_model_save, or its zero_to_fp32.py"
        yield Finding(
            "shape", "error", names[0],
            f"{counted(len(names), 'tensor')} without values, such as {names[0]} {list(tensors[names[0]].shape)}: "
            "DeepSpeed's ZeRO-3 saves a weight so if it has not gathered it.",
            "The weights of all processes.",
            f"Run `{restore(inventory, force=True)}`." if head.issuperset(names) else f"{gather}.",
        ), set(names)  # fmt: skip


def _unlike_down_proj(inventory: Inventory) -> Iterator[tuple[TensorInfo, int, bool]]:
    """Yield gate and up projections of another intermediate size than down_proj, that size, and whether of the head."""
    embedding = inventory.checkpoint.tensors.get(inventory.shared.get("embedding", ""))
    if embedding is None or len(embedding.shape) != 2 or not unpacked(embedding):
        return
    hidden, of_head = embedding.shape[1], {*inventory.stored.values()}
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in inventory.checkpoint.tensors.items():
        if len(info.shape) > 1 and unpacked(info) and hidden in info.shape[-2:] and (match := _MLP.fullmatch(name)):
            parts[match[1]][match[2]] = info
    for own in parts.values():
        if (down := own.pop("down_proj", None)) is not None:
            for part, info in own.items():
                size = _other_size(down, hidden) * (2 if part == "gate_up_proj" else 1)
                if _other_size(info, hidden) != size:
                    yield info, size, info.name in of_head


def _other_size(info: TensorInfo, hidden: int) -> int:
    rows, columns = info.shape[-2:]
    return rows if columns == hidden else columns


def vocabulary(inventory: Inventory) -> Iterator[Finding]:
    """Report vocab_size, the rows of embedding and lm_head, and the tokenizer's ids where they disagree."""
    infos = {role: inventory.checkpoint.tensors[name] for role, name in inventory.shared.items()}
    rows = {info.name: info.shape[0] for info in infos.values() if len(info.shape) == 2 and unpacked(info)}
    size = lookup_count(inventory.checkpoint.config, "vocab_size")
    wrong = [name for name, count in rows.items() if size not in (None, count)]
    if wrong:
        found = f"vocab_size is {size}, the rows are {joined(f'{rows[name]} of {name}' for name in wrong)}."
        yield _vocabulary("error", f"{CONFIG}: vocab_size", found, rows[wrong[0]])
    if not rows:
        return
    try:
        top, top_added = _top_ids(inventory.checkpoint.read_json(TOKENIZER) or {})
    except CheckpointError as error:
        yield _vocabulary("warning", TOKENIZER, f"{error}", min(rows.values()))
        return
    count, last = min(rows.values()), max(top, top_added)
    if last >= count:
        is_added = top < count  # the model runs on text without these
        what = "added tokens with ids" if is_added else "ids"
        found = f"{TOKENIZER} has {what} up to {last}, the embedding has {counted(count, 'row')}."
        yield _vocabulary("warning" if is_added else "error", TOKENIZER, found, count)


def _vocabulary(severity: Severity, place: str, found: str, rows: int) -> Finding:
    valid = f"One size: vocab_size = {rows}, and token ids below it."
    return Finding("vocabulary", severity, place, found, valid, "Take config, tokenizer and weights of one model.")


def _against_config(inventory: Inventory) -> Iterator[tuple[TensorInfo, str, str]]:
    hidden = lookup_count(inventory.checkpoint.config, "hidden_size")
    embedding = inventory.checkpoint.tensors.get(inventory.shared.get("embedding", ""))
    if hidden and embedding and len(embedding.shape) == 2 and unpacked(embedding):
        hidden = embedding.shape[1]  # another number in the config is another finding
    if hidden is None or inventory.family.trunk_kv:  # see `separate.query_head`
        return
    expected = {role: [hidden] for role in ("token_norm", "hidden_norm", "final_norm")}
    expected |= {"projection": [hidden, 2 * hidden]}
    expected |= {"token_projection": [hidden, hidden], "hidden_projection": [hidden, hidden]}
    if inventory.family.hidden == "streams":
        del expected["hidden_norm"]  # one family normalizes all its streams at once
    for canonical, name in inventory.stored.items():
        _, role, *rest = canonical.split(".", 2)
        info = inventory.checkpoint.tensors[name]
        if rest == ["weight"] and unpacked(info) and list(info.shape) != expected.get(role, list(info.shape)):
            yield info, str(expected[role]), f"as hidden_size is {hidden}"
    yield from _against_trunk_vocabulary(inventory)


def _against_trunk_vocabulary(inventory: Inventory) -> Iterator[tuple[TensorInfo, str, str]]:
    """Compare the head's own embedding and lm_head with the trunk's."""
    for canonical, name in inventory.stored.items():
        role, info = inventory.role(canonical), inventory.checkpoint.tensors[name]
        trunk = inventory.checkpoint.tensors.get(inventory.shared.get(role, ""))
        if role in inventory.family.own and trunk and unpacked(info) and unpacked(trunk) and info.shape != trunk.shape:
            yield info, str(list(trunk.shape)), f"as {trunk.name} is"


def _against_trunk(inventory: Inventory) -> Iterator[tuple[TensorInfo, str, str]]:
    if inventory.family.own_block:
        return
    reference = LayerReference(inventory)
    for tensors in reference.of_head.values():
        for path, info in tensors.items():
            if split_name(info.name, inventory.checkpoint.tensors)[1] not in _CODES:
                continue
            likes = [like for like in reference.forms.get(path, {}).values() if _comparable(info, like)]
            if likes and all(_sizes(like) != _sizes(info) for like in likes):
                yield info, some([str(list(like.shape)) for like in likes]), f"as {likes[0].name} is"


def _sizes(info: TensorInfo) -> tuple[int, ...]:
    """Return the sizes that do not depend on bits: MLX's codes of one row are words, as many as its bits need."""
    return info.shape[:-1] if info.dtype == "U32" else info.shape


def _of_logical_weights(inventory: Inventory) -> Inventory:
    """Return the inventory with one tensor for each packed weight, as trunk and head may have different bits."""
    try:
        checkpoint, packed = with_logical_weights(inventory.checkpoint)
    except CheckpointError:  # of the quantization config, see `precision`
        return inventory
    return Inventory.of(checkpoint, family=inventory.family) if packed else inventory


def _comparable(info: TensorInfo, like: TensorInfo) -> bool:
    """Whether both are stored alike; packed weights have other shapes, and MLX's split kv_b_proj other dimensions."""
    if 0 in (*info.shape, *like.shape) or len(info.shape) != len(like.shape):  # 0: of packed ones that cannot be read
        return False
    return like.dtype == info.dtype or (unpacked(like) and unpacked(info))


def _top_ids(tokenizer: Mapping[str, object]) -> tuple[int, int]:
    """Return the highest token id of a tokenizer.json's vocabulary, and of its added tokens; -1 if it has none."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    ids: list[object] = [len(vocab) - 1] if isinstance(vocab, list) else []
    ids += vocab.values() if isinstance(vocab, Mapping) else ()
    more = [each.get("id") for each in added if isinstance(each, Mapping)] if isinstance(added, list) else []
    top, top_added = (max((each for each in found if isinstance(each, int)), default=-1) for found in (ids, more))
    return top, top_added


RULES = (experts_pruned, shape, vocabulary)
