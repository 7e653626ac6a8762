"""Models whose config.json declares an MTP head that the vendor never published. Facts only; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from nextn.family_table.config_fields import levels, lookup_count
from nextn.family_table.rows import FAMILIES


@dataclass(frozen=True)
class Withheld:
    """Published models without the head that was trained with them, or with one that nobody can describe."""

    title: str
    model_types: tuple[str, ...]
    sources: tuple[str, ...]  # where users looked for it
    instead: str = ""  # what was published in its place, and what to do

    @property
    def sentence(self) -> str:
        """What was published, and what to do."""
        return self.instead or (
            f"the vendor of {self.title} published no MTP head, so none was lost and none can be restored; "
            "`nextn train --freeze-trunk --init-head` makes one"
        )


WITHHELD: tuple[Withheld, ...] = (
    Withheld(
        "MiniMax-M2 / M2.1 / M2.5 / M2.7", ("minimax_m2",),
        ("https://github.com/MiniMax-AI/MiniMax-M2/issues/47", "https://github.com/MiniMax-AI/MiniMax-M2.5/issues/8",
         "https://github.com/MiniMax-AI/MiniMax-M2.7/issues/16"),
    ),
    Withheld(
        "Kimi-K2 / K2.5 / K2.6 / K2.7-Code", ("kimi_k2", "kimi_k25"), ("https://github.com/ROCm/ATOM/issues/553",)
    ),
    # transformers takes the field out of Kimi-Linear's config, and has no pattern of tensors to skip.
    Withheld(
        "Kimi-Linear / VL", ("kimi_linear", "kimi_vl"),
        ("https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/kimi_linear/"
         "modular_kimi_linear.py", "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_vl.py"),
    ),
    Withheld(
        "Sarvam-MoE / MLA", ("sarvam_moe", "sarvam_mla"),
        ("https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/sarvam_mla/"
         "configuration_sarvam_mla.py",),
    ),
    Withheld(
        "Granite-Docling", ("granite_docling",),
        ("https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/granite_docling/"
         "modeling_granite_docling.py#L839",),
        "some checkpoints of Granite-Docling hold heads under mtp. for engines whose code is not public, so nextn does "
        "not know how they compute",
    ),
    Withheld(
        "Nemotron-3.5-Transcribe", ("nemotron3_5_transcribe",),
        ("https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/nemotron3_5_transcribe/"
         "modeling_nemotron3_5_transcribe.py#L119",),
        "Nemotron-3.5-Transcribe, a model of speech, holds a head under llm.mtp. that no public engine runs, so nextn "
        "does not know how it computes",
    ),
    Withheld(
        "DeepSeek-V4-Flash-0731 / DeepSeek-V4-Pro-0813 / DeepSeek-V4.1 / DeepSeek-V4.1-Flash / Mistral-Large-4", (),
        ("https://github.com/vllm-project/vllm/issues/41834", "https://github.com/Blaizzy/mlx-vlm/pull/2095"),
        "published with DSpark stages in place of an MTP head, under mtp. or mtp_dspark.; vLLM (method dspark) and "
        "SGLang (--speculative-algorithm DSPARK) run them, and nextn neither trains nor replaces them",
    ),
)  # fmt: skip


def withheld(config: Mapping[str, object]) -> Withheld | None:
    """Return the models of a config.json's `model_type`, or of its text model's, whose head was never published.

    Of two types that are known, the outer one counts: a Kimi-K3 has a text model of type kimi_linear.
    """
    kinds = [level.get("model_type") for level in levels(config)]
    known = {kind: None for row in FAMILIES for kind in row.model_types} | {
        kind: each for each in WITHHELD for kind in each.model_types
    }
    return next((known[kind] for kind in kinds if isinstance(kind, str) and kind in known), None)


def declared_fields(config: Mapping[str, object]) -> list[str]:
    """Return the fields by which any family's config declares MTP layers and that have a number above 0 here."""
    counts = {field: lookup_count(config, field) for row in FAMILIES for field in row.count_fields}
    return [f"{field} = {count}" for field, count in counts.items() if count]
