"""The commands that serve a checkpoint's head in another engine, with the pitfalls of its family and its files.

The facts are the family's row (`nextn.family_table`) and what `nextn audit` finds in the files.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nextn.audit_rules import Finding, audit
from nextn.audit_rules.engines import IDS as ENGINE_RULES
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.quantization import is_mlx
from nextn.edit.adopt import engines_after_adopting
from nextn.errors import CheckpointError, ConfigError
from nextn.family_table import EngineSupport
from nextn.family_table.engine_versions import NAMES, named
from nextn.text_format import joined

ENGINES = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp"}  # as in --print -> as in the family rows
# Flags that a family needs beyond the usual ones, from SGLang's server arguments.
FAMILY_FLAGS: Mapping[tuple[str, str], tuple[str, ...]] = {("sglang", "inkling"): ("--enable-multi-layer-eagle",)}
# llama.cpp's converter writes these heads as a GGUF of their own, with --mtp.
SEPARATE_GGUF = ("deepseek_v4",)
_DEFAULT_K = 3
_REFUSALS = {
    "loads": "reads this head and has no graph that runs it",
    "ignores": "skips this head on load",
    "drops": "drops this head at conversion",
    "refuses": "refuses this model",
    "absent": "does not know this family",
}
_STAGES = {"post": "after the final norm", "pre": "before the final norm", "streams": "as residual streams"}
_ABOUT_QUANTIZATION = re.compile("quantiz|bf16|FP8|FP4", re.IGNORECASE)
_GGUF_FORMATS = ("fp8",)  # quantization methods that llama.cpp's converter dequantizes


@dataclass(frozen=True)
class EngineCommands:
    """What serves a checkpoint in one engine."""

    engine: str  # `vllm`, `sglang` or `llama.cpp`
    commands: tuple[tuple[str, ...], ...]  # each as its arguments, to run one after the other; the last one serves
    notes: tuple[str, ...]  # what to know before, each a sentence


def engine_commands(
    checkpoint: Checkpoint, engine: str, *, num_speculative_tokens: int | None = None
) -> EngineCommands:
    """Return the commands that serve the checkpoint with its head in one of `ENGINES`.

    K defaults to 3, or for a head of several MTP layers, to their number. Raises ConfigError if the engine is unknown,
    or does not run the head, or K is below 1; CheckpointError without a complete head.
    """
    if engine not in ENGINES:
        raise ConfigError(f"--print {engine}; expected one of {', '.join(ENGINES)}")
    if num_speculative_tokens is not None and num_speculative_tokens < 1:
        raise ConfigError(f"-k {num_speculative_tokens}: the command serves with the head; expected at least 1 draft")
    inventory = Inventory.of(checkpoint)
    try:
        support = _support(inventory, engine)
    except ConfigError as error:
        engines = engines_after_adopting(checkpoint)
        if engine not in engines:
            raise
        verb = f"{joined(NAMES[each] for each in engines)} run this model with this head"
        raise ConfigError(
            f"{error}. In GLM-4.5's layout {verb}: `nextn adopt {shlex.quote(checkpoint.path)} OUT`, "
            f"then `nextn serve OUT --print {engine}`"
        ) from error
    if is_mlx(checkpoint):
        raise ConfigError(
            f"{checkpoint.path}: its weights are in MLX's layout, which mlx-lm, mlx-vlm and programs built on them "
            f"load, and {NAMES[engine]} does not: give the model that was converted"
        )
    _check_head(inventory)
    modules = len(inventory.modules)
    k = num_speculative_tokens or (modules if modules > 1 else _DEFAULT_K)
    if engine == "vllm" and k > modules > 1 and k % modules:
        raise ConfigError(f"K = {k}: above the {modules} MTP layers of this head, vLLM needs a multiple of {modules}")
    make = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llamacpp}[engine]
    pinned = ("--revision", checkpoint.ref) if checkpoint.ref is not None else ()
    notes = [
        f"Flags as of {named(engine)}, read in its code; not run with this model.",
        *_notes(inventory, support, engine, k),
    ]
    return EngineCommands(engine, make(inventory, k, pinned), tuple(notes))


def as_script(found: EngineCommands) -> str:
    """Return lines for a shell: notes as comments, then the commands."""
    comments = (f"# {note}" for note in found.notes)
    return "\n".join([*comments, *map(shlex.join, found.commands)])


def _support(inventory: Inventory, engine: str) -> EngineSupport:
    support = inventory.family.engines[ENGINES[engine]]
    runs = [name for name, row in ENGINES.items() if inventory.family.engines[row].support == "runs"]
    refusal = _REFUSALS.get(support.support)
    if refusal is None and engine == "llama.cpp" and _has_no_state(inventory.checkpoint.config):
        refusal = "aborts on a trunk of this family whose layers all have full attention"
        support, runs = replace(support, notes=()), [name for name in runs if name != engine]
    if refusal is None:
        return support
    instead = f"use {joined(NAMES[name] for name in runs)}" if runs else "none of the three does"
    reason = f": {'; '.join(support.notes)}" if support.notes else ""
    raise ConfigError(f"{named(engine)} {refusal} ({inventory.family.title}){reason}; {instead}")


def _has_no_state(config: Mapping[str, object]) -> bool:
    """Whether a trunk of a family with linear attention has none: llama.cpp asserts a state (GGML_ASSERT(buffer))."""
    types = config.get("layer_types")
    return "linear_num_value_heads" in config and isinstance(types, list) and "linear_attention" not in types


def _check_head(inventory: Inventory) -> None:
    inventory.refuse_draft_model()
    if not inventory.modules:
        raise CheckpointError(
            f"{inventory.checkpoint.path} has no MTP head, so no engine can draft with it; "
            f"restore it: {inventory.restore_command()}"
        )
    if inventory.is_head_alone and not inventory.family.separate:
        head = shlex.quote(inventory.checkpoint.path)
        raise CheckpointError(
            f"{inventory.checkpoint.path}: a head alone, which engines serve inside its model: `nextn restore MODEL "
            f"--from {head}` writes it there, then serve MODEL"
        )


def _vllm(inventory: Inventory, k: int, pinned: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    config = json.dumps({"method": "mtp", "num_speculative_tokens": k})
    flags = ("--speculative-config", config, *_flags(inventory, "vllm"))
    return (("vllm", "serve", inventory.checkpoint.path, *pinned, *flags),)


def _sglang(inventory: Inventory, k: int, pinned: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return (
        (
            "python", "-m", "sglang.launch_server", "--model-path", inventory.checkpoint.path, *pinned,
            "--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(k), "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(k + 1), "--enable-metrics", *_flags(inventory, "sglang"),
        ),
    )  # fmt: skip


def _llamacpp(inventory: Inventory, k: int, pinned: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The converter reads folders only, so a hub checkpoint is downloaded first."""
    path = inventory.checkpoint.path
    commands: list[tuple[str, ...]] = []
    if not Path(path).exists():
        folder = path.rpartition("/")[2]
        commands.append(("hf", "download", path, *pinned, "--local-dir", folder))
        path = folder
    name = Path(path).resolve().name
    commands.append(("python", "convert_hf_to_gguf.py", path, "--outfile", f"{name}.gguf"))
    draft: tuple[str, ...] = ()
    if inventory.family.name in SEPARATE_GGUF:
        commands.append(("python", "convert_hf_to_gguf.py", path, "--mtp", "--outfile", f"{name}-mtp.gguf"))
        draft = ("--model-draft", f"{name}-mtp.gguf")
    serve = ("llama-server", "-m", f"{name}.gguf", *draft, "--spec-type", "draft-mtp", "--spec-draft-n-max", str(k))
    return (*commands, (*serve, "--metrics", *_flags(inventory, "llama.cpp")))


def _flags(inventory: Inventory, engine: str) -> tuple[str, ...]:
    return FAMILY_FLAGS.get((engine, inventory.family.name), ())


def _notes(inventory: Inventory, support: EngineSupport, engine: str, k: int) -> list[str]:
    name, modules = NAMES[engine], len(inventory.modules)
    is_quantized = "quantization_config" in inventory.checkpoint.config
    facts = [note for note in support.notes if is_quantized or not _ABOUT_QUANTIZATION.search(note)]
    notes = [f"{name}: {fact}." for fact in facts]
    used = min(modules, support.modules or modules)
    if k > used:
        layers = "MTP layer" if used == 1 else f"{used} MTP layers"
        notes.append(f"{name} applies the head's {layers} again for draft {used + 1} and later ones.")
    for stage, what in ((support.hidden, "gives the head"), (support.next_hidden, "passes on between drafts")):
        if stage is not None:
            notes.append(f"{name} {what} the hidden state {_STAGES[stage]}, unlike the family: it may accept less.")
    if support.order is not None:
        notes.append(f"{name} runs the MTP layers in another order than the family: it may accept less.")
    return notes + _quantization_notes(inventory, engine) + _audit_notes(inventory, support, engine)


def _quantization_notes(inventory: Inventory, engine: str) -> list[str]:
    config = inventory.checkpoint.config.get("quantization_config")
    if not isinstance(config, Mapping):
        return []
    method = str(config.get("quant_method", "unknown"))
    if method == "gguf":
        return [f"Only nextn loads blocks of a GGUF file in a checkpoint: give {NAMES[engine]} the GGUF file itself."]
    if engine == "llama.cpp" and method not in _GGUF_FORMATS:
        return [
            f"The checkpoint is quantized ({method}), which the converter may refuse: convert the unquantized model."
        ]
    if engine == "llama.cpp":
        return [f"The converter dequantizes {method}; quantize the GGUF with llama-quantize."]
    return [f"{NAMES[engine]} reads the quantization ({method}) from config.json; it needs no flag."]


def _audit_notes(inventory: Inventory, support: EngineSupport, engine: str) -> list[str]:
    """What `audit` finds in these files, without reading all values, that concerns the engine."""
    findings = audit(inventory.checkpoint, sample=True).findings
    return [
        f"{finding.rule}: {finding.found} Fix: {finding.fix}"
        for finding in findings
        if _concerns(finding, support, NAMES[engine])
    ]


def _concerns(finding: Finding, support: EngineSupport, name: str) -> bool:
    if finding.rule == "shared-missing":
        return bool(support.unset or support.skips)
    if finding.rule in ENGINE_RULES and finding.rule != "trunk-missing":
        return not finding.rule.startswith("engine-") and name in finding.found
    return finding.severity != "note"
