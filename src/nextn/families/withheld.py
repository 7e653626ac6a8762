"""Models whose config.json tells of an MTP head that its vendor never published. Facts only; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from nextn.families.spec import lookup

_NEXTN = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers", "n_predict")


@dataclass(frozen=True)
class Withheld:
    """Published models without the head that was trained with them."""

    title: str
    model_types: tuple[str, ...]
    sources: tuple[str, ...]  # where users looked for it

    @property
    def sentence(self) -> str:
        """What was published, and what to do."""
        return (
            f"the vendor of {self.title} published no MTP head, so none was lost and none can be restored; "
            "`nextn train --freeze-trunk --init-head` makes one"
        )


WITHHELD: tuple[Withheld, ...] = (
    Withheld(
        "MiniMax-M2 / M2.1 / M2.5 / M2.7", ("minimax_m2",),
        ("https://github.com/MiniMax-AI/MiniMax-M2/issues/47", "https://github.com/MiniMax-AI/MiniMax-M2.5/issues/8",
         "https://github.com/MiniMax-AI/MiniMax-M2.7/issues/16"),
    ),
    Withheld("Kimi-K2 / K2.5", ("kimi_k2", "kimi_k25"), ("https://github.com/ROCm/ATOM/issues/553",)),
)  # fmt: skip


def withheld(config: Mapping[str, object]) -> Withheld | None:
    """Return the models of a config.json's `model_type`, or of its text model's, whose head was never published."""
    text = config.get("text_config")
    kinds = [part.get("model_type") for part in (config, text) if isinstance(part, Mapping)]
    return next((each for each in WITHHELD if any(kind in each.model_types for kind in kinds)), None)


def declared_fields(config: Mapping[str, object]) -> list[str]:
    """Return the fields by which published configs tell of MTP layers and that have a number above 0 here."""
    values = {field: lookup(config, field) for field in _NEXTN}
    return [f"{field} = {value}" for field, value in values.items() if type(value) is int and value > 0]
