"""Compare lists of quantized modules with each other and with the trunk's files; with the head's, `precision` does.

Also scales beside unquantized matrices, of trunk and head.

Engines build a module as the list says, and have no parameter for the other form's tensors.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from nextn.audit_rules.findings import Finding, restore
from nextn.audit_rules.precision import APPLIED_ON_LOAD
from nextn.checkpoint.declared_storage import declared_storage
from nextn.checkpoint.expert_forms import expert_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.quantization import QuantConfig, Storage, scale_of, split_name, storage
from nextn.errors import CheckpointError
from nextn.text_format import counted, joined, some

IDS = ("scale-unused",)  # and `quantization`, which is of `precision`
_LINEAR_ALONE = ("fp8", "mxfp8", "fbgemm-fp8")  # methods that leave out embed_tokens and lm_head without a list
_UNPACKED = ("plain", "unknown", "fp8-bare")  # or of no kind that says how it is read


def listed_modules(inventory: Inventory) -> Iterator[Finding]:
    """Run every rule; those on lists, if the config has a quantization that can be read."""
    yield from _scales_unused(inventory)
    try:
        config = QuantConfig.of(inventory.checkpoint)
        rules = (_trunk, _convolutions, _disputed, _of_other_kinds)
        found = [] if config is None else [finding for rule in rules for finding in rule(inventory, config)]
    except CheckpointError:  # `precision` reports it
        return
    yield from found


def _scales_unused(inventory: Inventory) -> Iterator[Finding]:
    """Report unquantized matrices with scales."""
    trunk = [info.name for layer in inventory.layers.values() for info in layer.values()]
    of_head, of_trunk = (_scales(inventory, names) for names in (sorted(inventory.spellings(inventory.stored)), trunk))
    if stray := of_head + of_trunk:
        whose = " and ".join(filter(None, ("the head" if of_head else "", "the trunk" if of_trunk else "")))
        yield Finding(
            "scale-unused", "error", stray[0],
            f"{counted(len(stray), 'scale')} of {whose} beside unquantized matrices: {some(stray)}. Loaders that "
            "build them so have no parameter for a scale, and fail; or the values are codes that lost their dtype.",
            "Scales beside quantized matrices only.",
            "Save the trunk again without them, if its values were dequantized; or take the files of another release."
            if of_trunk else restore(inventory, force=True),
        )  # fmt: skip


def _scales(inventory: Inventory, names: Iterable[str]) -> list[str]:
    """Return the scales of unquantized matrices among these tensors."""
    tensors = inventory.checkpoint.tensors
    stored = _matrices(inventory, (name for name in names if name.endswith(("scale", "scales", "_inv"))))
    found = (scale_of(f"{module}.weight", tensors) for module, kind in stored.items() if kind == "plain")
    return [scale for scale in found if scale]


def _trunk(inventory: Inventory, config: QuantConfig) -> Iterator[Finding]:
    """Report modules that are packed although the list leaves them out, or plain among packed ones of their name."""
    stored = _modules(inventory)
    packed = {module: kind for module, kind in stored.items() if kind not in _UNPACKED}
    names = {module.rpartition(".")[2] for module in packed}
    on_load = config.by_files or any(section.form in APPLIED_ON_LOAD for section in config.sections)
    plain = [module for module, kind in stored.items() if kind == "plain" and module.rpartition(".")[2] in names]
    shared = _matrices(inventory, inventory.shared.values()) if config.sections[0].form in _LINEAR_ALONE else {}
    whole = [module for module, kind in shared.items() if kind not in _UNPACKED]
    for claim, as_stored, wrong in (
        ("unquantized", "packed", whole + [module for module in packed if config.covers(module) is False]),
        ("quantized", "unquantized", [module for module in plain if not on_load and config.covers(module)]),
    ):
        if wrong:
            yield Finding(
                "quantization", "error", wrong[0],
                f"The trunk stores {counted(len(wrong), 'matrix')}, such as {some(wrong)}, {as_stored}, and the config "
                f"({config.method}) has engines build them {claim}: they do not load the weights.",
                f"The config of the files: these modules {as_stored}.",
                "Correct the list of modules in the config, or take these weights as the config has them.",
            )  # fmt: skip


def _convolutions(inventory: Inventory, config: QuantConfig) -> Iterator[Finding]:
    """Report quantized convolutions of recurrent layers, which engines build without the quantization config."""
    stored = _modules(inventory)
    packed = [module for module, kind in stored.items() if module.endswith("conv1d") and kind not in _UNPACKED]
    if wrong := [module for module in packed if config.covers(module) is not False]:  # the others are `_trunk`'s
        yield Finding(
            "quantization", "error", wrong[0],
            f"The trunk stores {counted(len(wrong), 'convolution')}, such as {some(wrong)}, packed, and engines build "
            "them unquantized whatever the config says: they do not load the weights.",
            "Unquantized convolutions.", "Take these weights from the model before it was quantized.",
        )  # fmt: skip


def _modules(inventory: Inventory) -> dict[str, Storage]:
    """Return the matrices of the trunk's layers and the lm_head, and their storage; of experts, one for all."""
    paths = {
        (index, re.sub(r"\d+", "0", path)): info for index, layer in inventory.layers.items()
        for path, info in layer.items() if (expert := expert_path(path)) is None or expert.form == "split"
    }  # fmt: skip
    names = [info.name for info in paths.values()]
    return _matrices(inventory, names + [name for role, name in inventory.shared.items() if role == "output"])


def _matrices(inventory: Inventory, names: Iterable[str]) -> dict[str, Storage]:
    """Return the modules of these tensors that hold a matrix, and how it is stored."""
    tensors, found = inventory.checkpoint.tensors, dict[str, Storage]()
    for module in dict.fromkeys(split_name(name, tensors)[0] for name in names):
        weight, kind = tensors.get(f"{module}.weight"), storage(tensors, module)
        if kind is not None and (kind != "plain" or (weight is not None and len(weight.shape) == 2)):
            found[module] = kind
    return found


def _disputed(inventory: Inventory, config: QuantConfig) -> Iterator[Finding]:
    """Report unquantized modules of the head that one of ModelOpt's two lists leaves out and the other does not."""
    stored = _matrices(inventory, sorted(inventory.spellings(inventory.own)))
    both = all(section.form.startswith("modelopt") for section in config.sections)
    wrong = [module for module, kind in stored.items() if both and kind == "plain" and config.disputed(module)]
    if wrong:
        sections = [f"{section.file}: {'.'.join(section.keys)}" for section in config.sections]
        yield Finding(
            "quantization", "warning", wrong[0],
            f"{joined(sections)} contradict each other on {counted(len(wrong), 'matrix')} of the head, such as "
            f"{some(wrong)}: one has engines build them quantized. vLLM and SGLang read config.json first, and "
            "TensorRT-LLM hf_quant_config.json.",
            "The same modules in each list.", restore(inventory, force=True, own=True),
        )  # fmt: skip


def _of_other_kinds(inventory: Inventory, config: QuantConfig) -> Iterator[Finding]:
    """Report quantized matrices that are stored as another kind than the config declares."""
    head = _matrices(inventory, sorted(inventory.spellings(inventory.own)))
    for what, stored in {"The head": head, "The trunk": _modules(inventory)}.items():
        wrong = defaultdict[Storage, list[str]](list)
        for module, kind in stored.items():
            declared = declared_storage(config, module) if kind not in _UNPACKED and config.covers(module) else None
            if declared is not None and kind not in declared:
                wrong[kind].append(module)
        for kind, modules in wrong.items():
            valid = joined(sorted(declared_storage(config, modules[0]) or ()))
            yield Finding(
                "quantization", "error", modules[0],
                f"{what} stores {counted(len(modules), 'matrix')}, such as {some(modules)}, as {kind}, and the config "
                f"({config.method}) has engines build them as {valid}: they do not load the weights.",
                "Weights as the config has them.",
                restore(inventory, force=True) if what == "The head" else
                "Take config and weights of one model, or list these modules with their own settings.",
            )  # fmt: skip


RULES = (listed_modules,)
