"""Experts that keep the codes of a quantized checkpoint: their weights, of 4 or 8 bits or fp8, stay in its files.

The native backend packs the codes as they are; torch dequantizes the experts that tokens are routed to, one by one.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from nextn.model.packed_linear import PackedLinear, StoredCodes, packed_layers, stored_codes
from nextn.model.stored_experts import StoredExperts, run_in_groups


@dataclass(frozen=True, eq=False)
class StackedCodes:
    """One weight [E, N, K] of all experts, as it is stored. The files must not change.

    `stand_in` [E, N, K] has the memory of N values, in the dtype of the layer. The address of a slice of its rows
    identifies them where a pass is recorded; it is NaN, as that of `StoredCodes`. `experts` has for each expert the
    stored matrices that follow each other in its N rows; alike in all experts.
    """

    stand_in: Tensor
    experts: Sequence[Sequence[StoredCodes]]

    @classmethod
    def of(cls, stored: StoredExperts, name: str) -> "StackedCodes":
        """Describe the stacked parameter `name`. Raises CheckpointError for groups that do not exist."""
        shape, dtype = stored.forms[name]
        rows = torch.full((shape[0],), torch.nan, dtype=dtype)
        stand_in = rows[None, :, None].expand(len(stored.names), *shape)
        kinds, info = stored.layout[name], stored.weights.checkpoint.info
        sizes = [info(stored.names[0][kind]).shape[0] for kind in kinds]
        experts = [
            [
                stored_codes(stored.weights.stored(names[kind]), part)
                for kind, part in zip(kinds, own.split(sizes), strict=True)
            ]
            for names, own in zip(stored.names, stand_in, strict=True)
        ]
        return cls(stand_in, experts)

    @property
    def name(self) -> str:
        """The stored name of the first matrix."""
        return self.experts[0][0].name

    @property
    def memory(self) -> Tensor:
        """The memory of the stand-in."""
        return self.stand_in[0, :, 0]

    @property
    def matrices(self) -> list[StoredCodes]:
        return [matrix for expert in self.experts for matrix in expert]

    def parts(self, weight: Tensor) -> list[list[StoredCodes]] | None:
        """Return the stored matrices of each expert in a slice [E, n, K] of the stand-in; None if it divides one."""
        first = (weight.data_ptr() - self.stand_in.data_ptr()) // weight.element_size()
        bounds = [0, *accumulate(len(matrix.stand_in) for matrix in self.experts[0])]
        ends = {first, first + weight.shape[1]}
        if weight.ndim != 3 or len(weight) != len(self.experts) or not ends.issubset(bounds):
            return None
        start, end = (bounds.index(bound) for bound in sorted(ends))
        return [list(expert[start:end]) for expert in self.experts]

    def dequantize(self, expert: int) -> Tensor:
        """Return the weight [N, K] of an expert in the dtype of the layer."""
        return torch.cat([matrix.dequantize() for matrix in self.experts[expert]])

    def __deepcopy__(self, memo: object) -> "StackedCodes":
        return self


class PackedExperts(nn.Module):
    """A module of experts that keep their codes. It has no parameters: nothing in it can be trained."""

    def __init__(self, experts: nn.Module, codes: Mapping[str, StackedCodes]) -> None:
        """Take the parameters that are named in `codes` from a module of experts as transformers defines it."""
        super().__init__()
        self.codes, self.is_recorded = codes, False
        for name in codes:
            delattr(experts, name)
        self.experts = experts
        self.train(experts.training)

    def forward(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute states [T, H] for chosen experts [T, k] with these weights [T, k]."""
        if self.is_recorded:
            with self._holding({name: codes.stand_in for name, codes in self.codes.items()}):
                computed: Tensor = self.experts(states, chosen, weights)
                return computed
        return run_in_groups(self.experts, lambda _: self._one_by_one(chosen), states, chosen, weights)

    def as_experts(self) -> nn.Module:
        """Return the module with its weights dequantized."""
        for name, value in self._dequantized().items():
            self.experts.register_parameter(name, nn.Parameter(value))
        return self.experts

    def _one_by_one(self, chosen: Tensor) -> Generator[tuple[int, int], None, None]:
        """See `ExpertGroups`: only experts that are chosen are dequantized."""
        for expert in chosen.unique().tolist():
            if expert < self._num_experts:
                with self._holding({name: codes.dequantize(expert)[None] for name, codes in self.codes.items()}):
                    yield expert, expert + 1

    @contextmanager
    def _holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """While open, the module has these tensors in place of its parameters."""
        vars(self.experts).update(values)
        try:
            yield
        finally:
            for name in values:
                del vars(self.experts)[name]

    @property
    def _num_experts(self) -> int:
        return len(next(iter(self.codes.values())).experts)

    def _dequantized(self) -> dict[str, Tensor]:
        indices = range(self._num_experts)
        return {name: torch.stack([codes.dequantize(i) for i in indices]) for name, codes in self.codes.items()}

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination |= {f"{prefix}{name}": value for name, value in self._dequantized().items()}


def can_keep_codes(experts: nn.Module, stored: StoredExperts) -> bool:
    """Return whether all parameters of a module, on the meta device, are weights that can stay in the files.

    The module must compute as transformers' experts interface defines.
    """
    if not hasattr(experts, "has_gate") or getattr(experts.config, "_experts_implementation", None) == "eager":
        return False
    names = (name for expert in stored.names for name in expert.values())
    own = _own_names(stored)
    if {name for name, _ in experts.named_parameters()} != own.keys() or not all(map(stored.weights.has_codes, names)):
        return False
    # Gated products read the weights of gate and up from one matrix each, and both in one form.
    is_gated = all(len(stored.layout[own[name]]) == (2 if name == "gate_up_proj" else 1) for name in own)
    return is_gated and all(len(_forms(stored, kinds)) == 1 for kinds in stored.layout.values())


def _forms(stored: StoredExperts, kinds: Sequence[str]) -> set[tuple[object, ...]]:
    """Return in what forms the experts' matrices of these kinds are stored."""
    packed = [stored.weights.packed.get(names[kind]) for names in stored.names for kind in kinds]
    return {("fp8",) if each is None else (each.layout, each.kind, each.bits, each.group_size) for each in packed}


def pack_experts(parent: nn.Module, path: str, stored: StoredExperts) -> None:
    """Replace the module of experts at `path`, which `can_keep_codes`."""
    codes = {name: StackedCodes.of(stored, key) for name, key in _own_names(stored).items()}
    parent.set_submodule(path, PackedExperts(parent.get_submodule(path), codes))


def _own_names(stored: StoredExperts) -> dict[str, str]:
    """A parameter's name in its module -> in the layout."""
    return {key.rpartition(".")[2]: key for key in stored.layout}


def packed_parts(*modules: nn.Module) -> Iterator[PackedLinear | PackedExperts]:
    """Yield linear layers and experts that keep their codes."""
    yield from packed_layers(*modules)
    yield from (part for module in modules for part in module.modules() if isinstance(part, PackedExperts))


def weights_with_codes(*modules: nn.Module) -> Iterator[StoredCodes | StackedCodes]:
    """Yield their weights."""
    for part in packed_parts(*modules):
        yield from part.codes.values() if isinstance(part, PackedExperts) else [part.codes]


def dequantize(module: nn.Module) -> None:
    """Replace what keeps its codes by modules with dequantized weights."""
    for name, part in [*module.named_modules()]:
        if isinstance(part, PackedLinear):
            module.set_submodule(name, part.as_linear())
        elif isinstance(part, PackedExperts):
            module.set_submodule(name, part.as_experts())
