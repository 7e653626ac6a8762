"""The names under which a checkpoint stores its head, and those under which engines look for it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.head_inventory import Inventory
from nextn.edit.find_head import elsewhere
from nextn.family_table import Family, rows

_MAX_KINDS = 1000  # names to match against all families; names that differ only in numbers count once


@dataclass(frozen=True)
class HeadStructure:
    """The tensor names under which one checkpoint stores its head."""

    inventory: Inventory

    @cached_property
    def roles(self) -> Mapping[int, frozenset[str]]:
        """Return module -> its stored roles, without copies of the trunk's tensors."""
        own = {module: roles - set(self.inventory.family.copies) for module, roles in self.inventory.roles.items()}
        return {module: roles for module, roles in own.items() if roles}

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Return the MTP layers that belong to a head; trunk layers beyond the config's count are left out."""
        appended = "{layer}" in self.inventory.family.names["block"]
        return tuple(module for module, roles in self.roles.items() if roles != {"block"} or not appended)

    @cached_property
    def counted_as_trunk(self) -> Mapping[int, list[str]]:
        """Return trunk layer -> the head's own paths in it; empty unless num_hidden_layers counts the head."""
        names, copies = self.inventory.family.names, self.inventory.family.copies
        if "{layer}" not in names["block"]:
            return {}
        root = names["block"] + "."
        own = {
            path.removeprefix(root)
            for role, path in names.items()
            if role not in ("block", *copies) and path.startswith(root)
        }
        layers = sorted(self.inventory.layers.items())
        matches = {index: sorted(path for path in own if f"{path}.weight" in layer) for index, layer in layers}
        return {index: paths for index, paths in matches.items() if paths}

    @cached_property
    def other_layout(self) -> tuple[tuple[Family, ...], tuple[str, ...]]:
        """Return the families whose layout matches the most unrecognized names (with ties), and those names."""
        kinds = {re.sub(r"\d+", "0", name): name for name in reversed(self.inventory.unrecognized)}
        candidates = list(kinds.values())[:_MAX_KINDS]
        best: tuple[list[Family], list[str]] = [], []
        for family in (*elsewhere(self.inventory), *rows()):
            canonicals = {name: family.canonical(name, self.inventory.num_layers) for name in candidates}
            matches = [name for name, canonical in canonicals.items() if canonical]
            if not any(canonical and canonical.split(".")[1] != "block" for canonical in canonicals.values()):
                continue
            if len(matches) > len(best[1]):
                best = [family], matches
            elif matches and matches == best[1] and best[0][0].name != self.inventory.family.name:
                best[0].append(family)
        return tuple(best[0]), tuple(sorted(best[1]))

    @property
    def layer_offset(self) -> int:
        """Number of layers between the index that the config implies for the head and the one where it is stored."""
        appended = "{layer}" in self.inventory.family.names["block"]
        # With all heads inside the declared range, the first are missing.
        outside = bool(self.heads) and self.heads[-1] >= self.inventory.declared
        return self.heads[0] if outside and appended else 0

    @property
    def misplaced(self) -> bool:
        """Whether the head is stored in another place than the config implies."""
        return bool(self.counted_as_trunk or self.layer_offset or (self.other_layout[1] and not self.heads))


def own_names(inventory: Inventory) -> list[str]:
    """Return the names under which engines look for the first module."""
    family = inventory.family
    roles = [role for role in family.names if role not in family.copies and role != "block"]
    return [inventory.published(f"0.{role}") for role in roles]


def count_field(inventory: Inventory) -> str:
    """Return the place of findings on the number of MTP layers."""
    return f"{CONFIG}: {inventory.family.count_field(inventory.checkpoint.config)}"
