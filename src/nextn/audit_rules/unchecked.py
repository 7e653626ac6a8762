"""What no rule looks at, so that a clean report does not say more than was seen."""

from collections.abc import Iterator

from nextn.audit_rules.layer_reference import LayerReference
from nextn.audit_rules.trunk_layers import FINAL_NORMS
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.quantization import QuantConfig, split_name, stored_modules
from nextn.errors import CheckpointError
from nextn.text_format import counted, some


def unchecked(inventory: Inventory, *, trunk: Inventory | None = None) -> Iterator[str]:
    """Yield what of a checkpoint, or of its head beside this trunk, was not checked, each without a period."""
    if not inventory.layers and inventory.family.trunk_kv:
        yield "the values of the trunk, whose keys this head reads"
    elif not inventory.layers:
        missing = "the trunk, of which no layer is stored, and " if trunk is None else ""
        yield f"{missing}what the trunk's layers say about the head's names and shapes"
    elif inventory.stored and all(LayerReference(inventory).compare(module).layer < 0 for module in inventory.modules):
        yield "the names inside the head's block, as the trunk is incomplete"
    other = inventory.draft_model
    if other is not None and other.names:
        yield f"the {counted(len(other.names), 'tensor')} of the {other.kind.name} draft model"
    others = _others(inventory)
    if others:
        yield f"{counted(len(others), 'tensor')} outside the trunk's layers and the head, such as {some(others[:2])}"
    elif inventory.layers:
        for part in ("vision_config", "audio_config"):
            if inventory.checkpoint.config.get(part):
                yield f"the model of {part}, of which no tensor is stored"
    if method := _unknown_method(inventory):
        yield f"which modules {method} quantizes, as nextn does not know this method"
    stored = [name for name in inventory.stored if inventory.role(name) not in inventory.family.orders]
    head = {name: inventory.checkpoint.tensors[name] for name in inventory.spellings(stored)}
    if packed := sorted({kind for _, kind in stored_modules(head)} - {"plain", "fp8-block", "fp8-tensor"}):
        yield f"the values of the head's packed matrices ({', '.join(packed)})"


def _others(inventory: Inventory) -> list[str]:
    """Return the tensors that are neither the head's, nor in a trunk layer, nor shared with the head."""
    known = inventory.spellings(inventory.stored) | set(inventory.shared.values()) | set(inventory.unrecognized)
    known |= set() if inventory.draft_model is None else inventory.draft_model.names
    known |= {info.name for layer in inventory.layers.values() for info in layer.values()}
    tensors = inventory.checkpoint.tensors
    parts = {split_name(name, tensors)[0] for name in inventory.shared.values()}  # and of packed ones, scales
    names = (name for name in tensors if name not in known and not name.endswith(FINAL_NORMS))
    return [name for name in names if split_name(name, tensors)[0] not in parts]


def _unknown_method(inventory: Inventory) -> str:
    try:
        config = QuantConfig.of(inventory.checkpoint)
    except CheckpointError:  # `precision` reports it
        return ""
    return "" if config is None or config.known else config.method
