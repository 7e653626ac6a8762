"""Write a head that was added to a model for an engine, with the command that serves it beside the unchanged trunk.

Facts about engines: those in `engine_versions.RUN` were run with such heads; SGLang was read, not run.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nextn.checkpoint.checkpoint import CONFIG, SINGLE, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import GENERIC, misfits, open_head, quantized, trunk_family
from nextn.checkpoint.snapshot import folder_of, on_disk
from nextn.edit.adopt import engines_after_adopting
from nextn.edit.compatibility import absent, lone_experts
from nextn.edit.execute import execute
from nextn.edit.gguf_export import refuse_modules, refuse_trunk, refuse_without_gguf, write_gguf
from nextn.edit.gguf_layout import STEP35, layout_of
from nextn.edit.gguf_tokenizer import writable_tokenizer
from nextn.edit.plan import EditPlan, Files, Piece, new_folder
from nextn.edit.restore import restore
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import REPEATED_FIELD, Family, find, lookup
from nextn.family_table.engine_versions import NAMES, RUN, named
from nextn.text_format import docs_page, joined

ENGINES = tuple(NAMES)
_RUN_BY = {"vllm": "its Python interface", "llama.cpp": "llama-server"}  # of two-layer models, on CPUs
_NO_PAIR = (
    "llama.cpp would run it beside the trunk with bad drafts and no error: its graphs of models without a head hand "
    "over no hidden state, and llama-context.cpp:1622 skips the copy"
)
_CONVERTED = "glm4_moe"  # llama.cpp's converter takes its files with GLM's own tokenizer alone (base.py:2361)
_K = 3
_LOCAL = ("source", "trunk")  # of a file's metadata: folders of the run and of the trunk


class _Adoptable(FamilyError):
    """The engine runs the head once trunk and head are in another layout."""


@dataclass(frozen=True)
class Export:
    """What was written, and how it is used."""

    path: Path  # the new checkpoint; for llama.cpp a GGUF file
    engine: str  # the engine's name with the version that the commands are for
    command: tuple[str, ...] = ()  # the arguments of the command that serves it; empty for transformers
    code: str = ""  # python code, for transformers
    notes: tuple[str, ...] = ()  # what to know, each a sentence


def export(
    source: str | Path,
    out: str | Path,
    engine: str,
    *,
    trunk: str | Path | None = None,
    tokenizer: Path | None = None,
    num_speculative_tokens: int | None = None,
) -> Export:
    """Write the head `source` into the new folder `out`, as `engine`, one of `ENGINES`, loads it.

    The folder has the draft alone, or for transformers the trunk with the head; for llama.cpp `out` is a new .gguf file
    with both. For these two, `source` may be a model with the head inside. By default, `trunk` is the folder that the
    head was trained on, if it is still there, or is inside. `tokenizer` is a GGUF with the trunk's tokenizer, for
    llama.cpp if nextn cannot write it. K is that of the command.

    Raises ConfigError if the engine is unknown, or cannot run the head; CheckpointError if the head is incomplete, or
    was trained on another trunk; FamilyError for a layout that the engine does not run.
    """
    if engine not in ENGINES:
        raise ConfigError(f"--for {engine}; expected {', '.join(ENGINES)}")
    if tokenizer is not None and engine != "llama.cpp":
        raise ConfigError(f"--tokenizer {tokenizer}: only for llama.cpp, whose file has the trunk's tokenizer")
    head, base = _opened(source, trunk)
    _refuse(head, base, engine)
    if engine == "transformers" and not head.family.trunk_kv:
        return _for_transformers(head, base, Path(out))
    if engine == "llama.cpp":
        base = on_disk(base)
        write_gguf(base, head, Path(out), tokenizer=tokenizer)
        command = _llamacpp(str(out), num_speculative_tokens or _K, has_window=layout_of(head.family) == STEP35)
        return Export(Path(out), named(engine), command, notes=tuple(_notes(head, base, engine)))
    files = Files(
        {SINGLE: {name: Piece(head.checkpoint, name) for name in head.stored.values()}},
        None,
        dropped=head.checkpoint.files,
        gone=frozenset(head.checkpoint.tensors.keys() - set(head.stored.values())),
    )
    documents = {CONFIG: head.checkpoint.config}
    stored = next(iter(head.checkpoint.headers.values())).metadata
    # The draft may be published; what an edit keeps of its files' metadata is overridden here.
    metadata = {key: "" if key in _LOCAL else value for key, value in stored.items()}
    plan = EditPlan(
        head.checkpoint, new_folder(out), head.family.name, files, documents, new_folder=True, metadata=metadata
    )
    execute(plan)
    k = num_speculative_tokens or _K
    if head.family.trunk_kv:
        return _assistant(plan.folder, engine, base.checkpoint.path, str(out), k)
    command = draft_command(engine, base.checkpoint.path, str(out), k)
    return Export(plan.folder, named(engine), command, notes=tuple(_notes(head, base, engine)))


def export_command(source: str, trunk: str, engine: str, k: int | None) -> str:
    """Return the command that writes this head for an engine, with --adopt where that is the only way.

    Raises the errors of `export` where there is none.
    """
    head, base = _opened(source, trunk)
    adoption = ""
    try:
        _refuse(head, base, engine)
    except _Adoptable:
        adoption = " --adopt"
    out = "OUT.gguf" if engine == "llama.cpp" else "OUT"
    options = adoption + ("" if k is None else f" -k {k}")
    return f"nextn export {shlex.quote(source)} {out} --model {shlex.quote(trunk)} --for {engine}{options}"


def _opened(source: str | Path, trunk: str | Path | None) -> tuple[Inventory, Inventory]:
    """Return the head and its trunk."""
    checkpoint = Checkpoint.open(trunk_path(Checkpoint.open(source), trunk))
    base = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    return open_head(source, base), base


def trunk_path(head: Checkpoint, trunk: str | Path | None) -> str | Path:
    """Return `trunk`, or the folder of the trunk that a head was trained on; ConfigError if that is unknown or gone."""
    path = trunk or next((each.metadata["trunk"] for each in head.headers.values() if "trunk" in each.metadata), None)
    if path is None and Inventory.of(head, family=trunk_family(head)).layers:
        return head.path  # the head is inside
    if path is None or (trunk is None and not Path(path).is_dir()):
        named = f"was trained on {path}, which is not there"
        where = "does not say which trunk it was trained on" if path is None else named
        raise ConfigError(f"{head.path}: {where}; give the folder of its trunk with --model")
    return path


def layout_for(engine: str, config: Mapping[str, object]) -> str | None:
    """Return the `--layout` of a new head that is to be exported for an engine; None: the trunk's own."""
    has_family = find(config) is not None
    return None if has_family else {"vllm": "mimo", "sglang": "mimo", "llama.cpp": "step35"}.get(engine)


def check_export(engine: str, family: Family, trunk: Inventory, *, num_modules: int = 1) -> None:
    """Raise, before training, what `export` would for any head of this family on this trunk (for llama.cpp local)."""
    path = trunk.checkpoint.path
    _refuse_family(family, trunk, engine, path)
    if listed := [f"{each.found} {each.fix}" for each in quantized(family, trunk) if engine in each.engines]:
        raise CheckpointError(f"{path}: no head can be exported for {named(engine)}: {' '.join(listed)}")
    if engine == "llama.cpp":
        refuse_without_gguf()
        refuse_modules(path, num_modules)
        refuse_trunk(trunk.checkpoint, family)
        writable_tokenizer(folder_of(trunk.checkpoint))


def _refuse(head: Inventory, trunk: Inventory, engine: str) -> None:
    path = head.checkpoint.path
    with _naming_adoption(head, trunk, engine):
        _refuse_family(head.family, trunk, engine, path)
        if engine == "llama.cpp":
            refuse_trunk(trunk.checkpoint, head.family)
    listed = [f"{each} is missing" for each in absent(head)]
    listed += [f"{each.found} {each.fix}" for each in misfits(head, trunk) if engine in each.engines]
    if listed:
        raise CheckpointError(f"{path}: cannot be exported for {named(engine)}:\n  " + "\n  ".join(listed))


@contextmanager
def _naming_adoption(head: Inventory, trunk: Inventory, engine: str) -> Iterator[None]:
    """Add to a FamilyError that trunk and head can move to a layout that the engine runs, where they can."""
    try:
        yield
    except FamilyError as error:
        path = head.checkpoint.path
        alone = None if path == trunk.checkpoint.path else path
        if engine not in engines_after_adopting(trunk.checkpoint, alone):
            raise
        raise _Adoptable(
            f"{error}. Or keep this head: --adopt writes trunk and head in GLM-4.5's layout, which {named(engine)} runs"
        ) from error


def _refuse_family(family: Family, trunk: Inventory, engine: str, path: str) -> None:
    """Raise FamilyError, naming `path`, for an engine that does not run heads of this family on this trunk."""
    if reason := lone_experts(trunk.family, trunk.checkpoint.config):
        raise FamilyError(f"{trunk.checkpoint.path}: cannot be served: {reason}. Give it two experts in each group")
    if family.trunk_kv:
        if engine == "llama.cpp":
            raise FamilyError(f"{path}: llama.cpp's convert_hf_to_gguf.py writes it as a GGUF of its own")
        return
    is_added = family.name == GENERIC or family.separate
    if not is_added and not (engine == "llama.cpp" and family.name == _CONVERTED):
        if engine == "transformers" and engine in family.runners:
            way = "load the model as it is, and call `model.generate(**inputs, use_mtp=True)`"
        elif engine.replace(".", "") in family.runners:
            folder = shlex.quote(trunk.checkpoint.path)
            way = f"it is served {_inside(trunk, path)}`nextn serve {folder} --print {engine}`"
        else:
            engines = [named(name) for name in ENGINES if name.replace(".", "") in family.runners]
            way = f"{named(engine)} does not run it; engines that do: {joined(engines) or 'none'}"
        raise FamilyError(f"{path}: a head of family {family.name}: {way}")
    if engine == "transformers" and family.name != GENERIC:
        raise FamilyError(f"{path}: transformers runs heads of the trunk's own layers; train one without --layout")
    if engine == "llama.cpp" and family.layer_model:
        raise FamilyError(f"{path}: {_NO_PAIR}; train a head with --layout step35, for one file with the trunk")
    if engine in ("vllm", "sglang") and not family.layer_model:
        raise FamilyError(f"{path}: {named(engine)} runs no head of the trunk's own layers; train with --layout mimo")


def _inside(trunk: Inventory, path: str) -> str:
    """Say how a head of the trunk's own family, at `path`, comes to be in its trunk."""
    if trunk.checkpoint.path == path:
        return "as it is: "
    command = trunk.restore_command(base=shlex.quote(path), force=bool(trunk.stored))
    return f"inside its trunk: `{command}` writes it there, then "


def _for_transformers(head: Inventory, trunk: Inventory, out: Path) -> Export:
    restore(trunk.checkpoint.path, head.checkpoint, out=out, family=GENERIC, force=True)
    code = (
        f"model = AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
        f"model._keys_to_ignore_on_load_unexpected.add(r'model\\.layers\\.{trunk.num_layers}\\.')  # the head\n"
        "model.generate(**inputs, use_mtp=True)"
    )
    return Export(out, named("transformers"), code=code, notes=("It drafts one token per round.",))


def _assistant(folder: Path, engine: str, trunk: str, draft: str, k: int) -> Export:
    """Return how a head that reads the trunk's keys is served, in the layout that it is published in."""
    code = (
        f"assistant = AutoModelForCausalLM.from_pretrained({draft!r})\n"
        f"assistant.generation_config.num_assistant_tokens = {k}\n"
        "model.generate(**inputs, assistant_model=assistant)"
    )
    command = {"vllm": _vllm(trunk, draft, k)[:-2], "sglang": _sglang(trunk, draft, k), "transformers": ()}[engine]
    notes = f"{named(engine)}: its code was read, it was not run."
    return Export(folder, named(engine), command, "" if command else code, (notes,))


def draft_command(engine: str, trunk: str, draft: str, k: int = _K) -> tuple[str, ...]:
    """Return the command by which vllm or sglang serves a draft beside its trunk, each a folder or hub id."""
    return {"vllm": _vllm, "sglang": _sglang}[engine](trunk, draft, k)


def _vllm(trunk: str, draft: str, k: int) -> tuple[str, ...]:
    speculative = {"method": "mtp", "model": draft, "num_speculative_tokens": k}
    # The draft's class takes the number of its layers from the trunk's config.
    overrides = {"num_nextn_predict_layers": 1}
    return (
        "vllm", "serve", trunk, "--speculative-config", json.dumps(speculative), "--hf-overrides", json.dumps(overrides)
    )  # fmt: skip


def _sglang(trunk: str, draft: str, k: int) -> tuple[str, ...]:
    return (
        "python", "-m", "sglang.launch_server", "--model-path", trunk, "--speculative-algorithm", "EAGLE",
        "--speculative-draft-model-path", draft, "--speculative-num-steps", str(k),
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(k + 1), "--enable-metrics",
    )  # fmt: skip


def _llamacpp(path: str, k: int, *, has_window: bool) -> tuple[str, ...]:
    window = ("--swa-full",) if has_window else ()
    return (
        "llama-server", "-m", path, "--spec-type", "draft-mtp", "--spec-draft-n-max", str(k), *window, "--metrics"
    )  # fmt: skip


def _notes(head: Inventory, trunk: Inventory, engine: str) -> Iterator[str]:
    if engine in _RUN_BY:
        run = f"{NAMES[engine]} {RUN[engine]} was run with two-layer models by {_RUN_BY[engine]} on a CPU"
        yield f"{run}; not this model, and no GPU."
    else:
        yield f"{named(engine)}: its code was read, it was not run."
    yield from (f"{each.found} {each.fix}" for each in misfits(head, trunk) if not each.engines)
    if lookup(head.checkpoint.config, REPEATED_FIELD) == "first":
        yield (
            f"{named(engine)} gives each depth keys of its own; this head's share those of the first (kv = first), "
            f"which made no measurable difference: {docs_page('reference/objectives')}."
        )
    if engine == "llama.cpp":
        yield "The file holds trunk and head, in the layout of an architecture whose graph computes the same trunk."
        return
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
