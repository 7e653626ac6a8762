"""Write a head that was added to a model for an engine, with the command that serves it beside the unchanged trunk.

Facts about engines: vLLM 0.32.0 was run with such drafts; SGLang 0.5.23 was read, not run.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nextn.checkpoint.checkpoint import CONFIG, SINGLE, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.separate_head import GENERIC, misfits, open_head, trunk_family
from nextn.edit.compatibility import absent
from nextn.edit.plan import EditPlan, Files, Piece, execute, new_folder
from nextn.edit.restore import restore
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.families import lookup

ENGINES = {"vllm": "vLLM 0.32.0", "sglang": "SGLang 0.5.23", "transformers": "transformers 5.23"}
_REFUSED = {
    "llama.cpp": "its graphs of models without a head never hand over the hidden state, and llama-context.cpp skips "
    "the copy silently, so that drafts would be bad without an error; a GGUF in the step35 layout is not written yet"
}
_K = 3
_LOCAL = ("source", "trunk")  # of a file's metadata: folders of the run and of the trunk


@dataclass(frozen=True)
class Export:
    """What was written, and how it is used.

    Args:
        folder: The new checkpoint.
        engine: The engine's name with the version that the commands are for.
        command: The arguments of the command that serves it; empty for transformers.
        code: Python code, for transformers.
        notes: What to know, each a sentence.
    """

    folder: Path
    engine: str
    command: tuple[str, ...] = ()
    code: str = ""
    notes: tuple[str, ...] = ()


def export(
    source: str | Path,
    out: str | Path,
    engine: str,
    *,
    trunk: str | Path | None = None,
    drafts: int | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
) -> Export:
    """Write the head `source` into the new folder `out`, as `engine` loads it.

    Args:
        source: A folder, .safetensors file or hub id with the head alone; for transformers also a model with it inside.
        out: A new folder: the draft alone, or for transformers the trunk with the head.
        engine: One of `ENGINES`.
        trunk: Folder of the trunk; None: the one that the head was trained on, if it is still there.
        drafts: K of the command.
        revision: Of a hub id of the head.
        cache_dir: Of hub ids.
        offline: Of hub ids: use the cache only.

    Raises:
        ConfigError: The engine is unknown, or cannot run the head.
        CheckpointError: The head is incomplete, or was trained on another trunk.
        FamilyError: The head is in a layout that the engine does not run.
    """
    if engine not in ENGINES:
        reason = f": {_REFUSED[engine]}" if engine in _REFUSED else f"; expected {', '.join(ENGINES)}"
        raise ConfigError(f"--for {engine}{reason}")
    found = Checkpoint.open(source, revision=revision, cache_dir=cache_dir, offline=offline)
    path = _trunk_path(found, trunk)
    checkpoint = Checkpoint.open(path, cache_dir=cache_dir, offline=offline)
    base = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    head = open_head(source, base, revision=revision, cache_dir=cache_dir, offline=offline)
    _refuse(head, base, engine)
    if engine == "transformers":
        return _for_transformers(head, base, Path(out))
    files = Files(
        {SINGLE: {name: Piece(head.checkpoint, name) for name in head.stored.values()}},
        None,
        dropped=head.checkpoint.files,
    )
    documents = {CONFIG: head.checkpoint.config}
    stored = next(iter(head.checkpoint.headers.values())).metadata
    metadata = {key: value for key, value in stored.items() if key not in _LOCAL}  # the draft may be published
    plan = EditPlan(
        head.checkpoint, new_folder(out), head.family.name, files, documents, new_folder=True, metadata=metadata
    )
    execute(plan)
    command = {"vllm": _vllm, "sglang": _sglang}[engine](base.checkpoint.path, str(out), drafts or _K)
    return Export(plan.folder, ENGINES[engine], command, notes=tuple(_notes(base, engine)))


def _trunk_path(head: Checkpoint, trunk: str | Path | None) -> str | Path:
    path = trunk or next((each.metadata["trunk"] for each in head.headers.values() if "trunk" in each.metadata), None)
    if path is None or (trunk is None and not Path(path).is_dir()):
        where = (
            "does not say which trunk it was trained on" if path is None else f"was trained on {path}, which is gone"
        )
        raise ConfigError(f"{head.path}: {where}; give the folder of its trunk with --model")
    return path


def _refuse(head: Inventory, trunk: Inventory, engine: str) -> None:
    path = head.checkpoint.path
    if engine == "transformers" and head.family.name != GENERIC:
        raise FamilyError(f"{path}: transformers runs heads of the trunk's own layers; train one without --layout")
    if engine != "transformers" and not head.family.layer_model:
        advice = "train one with --layout mimo" if head.family.name == GENERIC else "`nextn serve --print` is for it"
        raise FamilyError(f"{path}: {ENGINES[engine]} runs no separate head of family {head.family.name}; {advice}")
    listed = [f"{each} is missing" for each in absent(head)]
    listed += [f"{each.found} {each.fix}" for each in misfits(head, trunk) if engine in each.engines]
    if listed:
        raise CheckpointError(f"{path}: cannot be exported for {ENGINES[engine]}:\n  " + "\n  ".join(listed))


def _for_transformers(head: Inventory, trunk: Inventory, out: Path) -> Export:
    restore(trunk.checkpoint.path, head.checkpoint, out=out, family=GENERIC, force=True)
    code = (
        f"model = AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
        f"model._keys_to_ignore_on_load_unexpected.add(r'model\\.layers\\.{trunk.num_layers}\\.')  # the head\n"
        "model.generate(**inputs, use_mtp=True)"
    )
    return Export(out, ENGINES["transformers"], code=code, notes=("It drafts one token per round.",))


def _vllm(trunk: str, draft: str, drafts: int) -> tuple[str, ...]:
    speculative = {"method": "mtp", "model": draft, "num_speculative_tokens": drafts}
    # The draft's class takes the number of its layers from the trunk's config.
    overrides = {"num_nextn_predict_layers": 1}
    return (
        "vllm", "serve", trunk, "--speculative-config", json.dumps(speculative), "--hf-overrides", json.dumps(overrides)
    )  # fmt: skip


def _sglang(trunk: str, draft: str, drafts: int) -> tuple[str, ...]:
    return (
        "python", "-m", "sglang.launch_server", "--model-path", trunk, "--speculative-algorithm", "EAGLE",
        "--speculative-draft-model-path", draft, "--speculative-num-steps", str(drafts),
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(drafts + 1), "--enable-metrics",
    )  # fmt: skip


def _notes(trunk: Inventory, engine: str) -> Iterator[str]:
    yield f"{ENGINES[engine]}: {'tested' if engine == 'vllm' else 'its code was read, it was not run'}."
    if engine == "vllm":
        yield "--hf-overrides: vLLM reads the number of the draft's layers in the trunk's config."
    if lookup(trunk.checkpoint.config, "head_dim") not in (None, _qwen2_head_dim(trunk.checkpoint.config)):
        yield "The trunk's attention heads have another size than the draft's; vLLM needs one that divides the other."


def _qwen2_head_dim(config: Mapping[str, object]) -> int:
    hidden, heads = (lookup(config, name) for name in ("hidden_size", "num_attention_heads"))
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else 0


def as_text(made: Export) -> str:
    """Return the notes as comments, then the command or the code."""
    lines = [*(f"# {note}" for note in made.notes), shlex.join(made.command) if made.command else made.code]
    return "\n".join(lines)
