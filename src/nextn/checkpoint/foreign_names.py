"""Tensor names that programs have while they run, and that no loader of checkpoints maps: what wrote them. No torch.

Sources: PEFT 0.21, tuners/; torch.compile, DDP and FSDP, whose wrappers prefix names; vLLM 0.33,
layers/fused_moe/routed_experts.py; ModelOpt, torch/quantization; Megatron-LM, core/transformer.
"""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.safetensors_file import TensorInfo

_ADAPTER = (
    r"lora_[ABEab]|lora_embedding_[AB]|lora_magnitude_vector|ia3_l|p?vera_lambda_[bd]|ranknum|(?:hada|lokr|oft|loha|boft|"
    r"hra|road|c3a|randlora|fourierft|shira|vblora|unilora|hira|glora|miss|waveft|psoft|trainable_tokens|ln_tuning)_\w+"
)


@dataclass(frozen=True, slots=True)
class ForeignNames:
    """One kind of such names."""

    pattern: re.Pattern[str]
    # What takes the matched part's place in the name of a checkpoint; "\0": the tensor has no other name.
    plain: str | Callable[[re.Match[str]], str]
    what: str
    remedy: str
    in_engine: bool = False  # names of an engine's memory, which some families have in their files
    effect: str = "no loader of checkpoints maps them"
    severity: Literal["error", "warning", "note"] = "error"


_MATRIX = re.compile(rf".*\.(?:{_ADAPTER})(?:\..+|$)")
_UNMERGED = re.compile(r"^base_model\.model\.")
_MERGE = "Merge the adapter (PEFT's `merge_and_unload`, `mlx_lm.fuse`), save, and audit the result."


def _renamed(name: str) -> str:
    return (
        f"rename each file's tensors with safetensors.torch: save_file({{{name}: value for name, value in "
        "load_file(FILE).items()}, FILE, {'format': 'pt'}), and then run `nextn convert MODEL --reindex`."
    )


_UNWRAP = "Save the state of the unwrapped module; or " + _renamed("name.replace(PREFIX, '')")
KINDS = (
    ForeignNames(_MATRIX, "\0", "the matrices of an adapter", _MERGE),
    ForeignNames(_UNMERGED, "", "an adapter's model that was not merged (PEFT)", _MERGE),
    ForeignNames(
        re.compile(r"\.original_module(?=\.)|.*\.original_module$"), "\0",
        "the original of a module that an adapter replaces (PEFT)", _MERGE),
    ForeignNames(
        re.compile(r"\.base_layer(?=\.)|\.modules_to_save\.[^.]+(?=\.)"), "", "an adapter that was not merged (PEFT)",
        _MERGE),
    ForeignNames(
        re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."), "",
        "a wrapper of torch (compile, FSDP or activation checkpointing)", _UNWRAP),
    ForeignNames(re.compile(r"^module\."), "", "a wrapper of a data-parallel run (DDP, DeepSpeed)", _UNWRAP),
    ForeignNames(
        re.compile(r"(?<=\.experts\.)(?:routed_experts\.)?w13_weight"), "gate_up_proj",
        "fused experts in the memory of vLLM or SGLang", "Write the checkpoint's own names: experts.gate_up_proj.",
        in_engine=True),
    ForeignNames(
        re.compile(r"(?<=\.experts\.)(?:routed_experts\.)?w2_weight"), "down_proj",
        "fused experts in the memory of vLLM or SGLang", "Write the checkpoint's own names: experts.down_proj.",
        in_engine=True),
    ForeignNames(
        re.compile(r"^(?!.*visi)(?:.*\.)?(?:self_attn\.qkv_proj|mlp\.gate_up_proj)\.(?:weight|bias)$"), "\0",
        "fused projections in the memory of vLLM or SGLang",
        "Save the checkpoint's own: q_proj, k_proj and v_proj, gate_proj and up_proj.", in_engine=True),
    ForeignNames(
        re.compile(r"(?<=\.experts\.)gate_up_proj\.weight$"), "gate_up_proj", "fused experts with a module each",
        "Write the checkpoint's own names: experts.gate_up_proj and experts.down_proj, without .weight."),
    ForeignNames(
        re.compile(r"(?<=\.experts\.)((?:gate|up|down)_proj)\.weight(\d+)$"), r"\2.\1.weight",
        "experts numbered behind their weight (a merger of Megatron's files)",
        "Merge again with a newer version of the tool (verl); or "
        + _renamed(r"re.sub(r'(\w+)\.weight(\d+)$', r'\2.\1.weight', name)")),
    ForeignNames(
        re.compile(r"\b(mlp|shared_experts)\.linear_gate(?=\.weight$)"), r"\1.gate_proj",
        "transformers 5.23's save_pretrained of HY-V4, which renames the gates of MLPs as those of attention",
        "For engines, " + _renamed(r"re.sub(r'(mlp|shared_experts)\.linear_gate', r'\1.gate_proj', name)"),
        effect="transformers alone reads them"),
    ForeignNames(
        re.compile(r"^mtp\.normal\."), "mtp.", "the first of two heads (Intern-S2-Preview)",
        "LMDeploy reads them as they are; for other engines " + _renamed("name.replace('mtp.normal.', 'mtp.')"),
        effect="LMDeploy alone is known to map them, and vLLM drops them", severity="warning"),
    ForeignNames(
        re.compile(r"^mtp\.sci\..+"), "\0", "the second of two heads (Intern-S2-Preview)",
        "LMDeploy reads it with enable_sci_mtp; nothing else does.",
        effect="LMDeploy alone is known to map them", severity="note"),
    ForeignNames(
        re.compile(r".*\.(?:\w+_quantizer\.\w+|_extra_state)$"), "\0", "the state of ModelOpt or Megatron in training",
        "Export the model with the tool that trained it."),
    ForeignNames(
        re.compile(r"\.parametrizations\.(\w+)\.original\d?$"), r".\1", "a parametrization of torch",
        "Remove the parametrizations before saving."),
    ForeignNames(
        re.compile(  # "mtp_layers.0.mtp_model_layer" is IQuest-Q1's own
            r".*(?:\.(?:linear_qkv|linear_fc[12]|linear_proj|transformer_layer\.self_attention)"
            r"|(?:\bmtp\.layers\.\d+|^\d+\.block(?:\.\d+)?)\.mtp_model_layer)\..+"),
        "\0", "Megatron-LM's names", "Export the model to the Hugging Face layout (Megatron-Bridge, mbridge)."),
    ForeignNames(  # mlx_lm/models/deepseek_v3.py and others, sanitize
        re.compile(r"(?<=\.)(?:embed_q|unembed_out)(?=\.(?:weight|scales|biases)$)"),
        lambda part: "kv_b_proj" if part[0] == "embed_q" else "\0", "MLX, which splits kv_b_proj in two",
        "MLX's programs need no change; for other engines, take the model that it was converted from.",
        effect="MLX's programs alone read them"),
    ForeignNames(
        re.compile(r"^blk\.\d+\.ffn_\w+_exps\.\d+\.numa\..+"), "\0", "KTransformers' experts for processors",
        "Give the model that they were made from; these are for `--kt-weight-path` beside it.",
        effect="KTransformers alone maps them"),
    ForeignNames(
        re.compile(r"^(?!.*\.numa\.)(?:blk\.\d+|token_embd)\..+"), "\0", "llama.cpp (GGUF)",
        "Convert the GGUF file that they are from (`nextn convert FILE.gguf OUT`), or rename them."),
)  # fmt: skip


_MAX_LENGTH = (
    300  # characters; the patterns take time in the square of a name's length, and no program writes longer ones
)
_ANY = re.compile("|".join(f"(?:{kind.pattern.pattern})" for kind in KINDS))


def plain_name(name: str, own: tuple[str, ...] = ()) -> str | None:
    """Return the checkpoint's name for a tensor; None for one that has no other name, such as an adapter's matrices.

    `own` are ends of the family's own names that are an engine's in other families, `Family.runtime_names`.
    """
    for kind in KINDS if len(name) <= _MAX_LENGTH else ():
        if kind.in_engine and name.endswith(own):
            continue
        name, count = kind.pattern.subn(kind.plain, name)
        if count and "\0" in name:
            return None
    return name


def foreign(names: Iterable[str], own: tuple[str, ...] = ()) -> list[tuple[ForeignNames, list[str]]]:
    """Return each kind with the names that are of it; own: as in `plain_name`."""
    marked = [name for name in names if len(name) <= _MAX_LENGTH and _ANY.search(name)]
    # A tensor that has no other name is of the kind that says so alone.
    nameless = {name for name in marked if plain_name(name, own) is None}
    found = [(kind, [name for name in marked if kind.pattern.search(name)
                     and not (kind.in_engine and name.endswith(own))
                     and (kind.plain == "\0") == (name in nameless)]) for kind in KINDS]  # fmt: skip
    return [(kind, same) for kind, same in found if same]


def of_adapter(names: Collection[str]) -> bool:
    """Whether a file with these tensors is an adapter, which may have modules that were trained whole among them."""
    matrices = {name for name in names if len(name) <= _MAX_LENGTH and _MATRIX.match(name)}
    return bool(matrices) and all(name in matrices or _UNMERGED.match(name) for name in names)


def with_plain_names(checkpoint: Checkpoint, own: tuple[str, ...]) -> Checkpoint:
    """Return the checkpoint with the names that its tensors would have; those that have none are left out."""
    fused = {f"{name.removesuffix('gate_up_proj.weight')}down_proj.weight" for name in checkpoint.tensors
             if name.endswith(".experts.gate_up_proj.weight")}  # fmt: skip
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        plain = plain_name(name, own)
        if plain is not None:
            plain = plain.removesuffix(".weight") if name in fused else plain
            tensors[plain] = info if info.name == plain else replace(info, name=plain)
    return replace(checkpoint, tensors=tensors)
