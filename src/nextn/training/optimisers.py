"""Which optimiser each parameter has, its learning rate at a step, and its state as named tensors."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from nextn.distributed.sharding import gather_gradients, like, undivided
from nextn.errors import CheckpointError
from nextn.training.half import half_pays
from nextn.training.muon import Muon32
from nextn.training.train_config import TrainConfig


def optimisers(named: Mapping[str, nn.Parameter], config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for inner matrices where the config says so, over the parameters that take a gradient."""
    named = {name: value for name, value in named.items() if value.requires_grad}
    matrices = [value for name, value in named.items() if config.optimizer == "muon" and _is_inner_matrix(name, value)]
    taken = {id(value) for value in matrices}
    rest = [value for value in named.values() if id(value) not in taken]
    # Norm gains and biases are not decayed: pulling a gain to 0 (or 1 + w to 1) is not what decay is for.
    groups = [
        {"params": [value for value in rest if value.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [value for value in rest if value.ndim < 2], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)]
    if matrices:
        fits = half_pays(matrices[0].device.type)
        muon = (torch.optim.Muon if fits else Muon32)(
            matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        muon.register_step_pre_hook(gather_gradients)
        found.append(muon)
    for optimiser in found:
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
    return found


def set_rates(each: Sequence[torch.optim.Optimizer], scale: float) -> None:
    """Learning rates: `scale` times what the optimisers were made with."""
    for optimiser in each:
        for group in optimiser.param_groups:
            group["lr"] = group["initial_lr"] * scale


def state_tensors(each: Sequence[torch.optim.Optimizer], named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`<parameter>.<key>` -> tensor of what the optimisers remember."""
    names = {id(value): name for name, value in named.items()}
    return {
        f"{names[id(parameter)]}.{key}": torch.as_tensor(value)
        for optimiser in each
        for parameter, state in optimiser.state.items()
        for key, value in state.items()
    }


def state_bytes(each: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes of `state_tensors`, also before the first step."""
    return sum(value.nbytes * (len(keys) - ("step" in keys)) for _, value, keys in _wanted(each))


def load_state_tensors(
    each: Sequence[torch.optim.Optimizer], named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Inverse of `state_tensors`, from whole tensors. Raises CheckpointError that names what is missing."""
    names, missing = {id(value): name for name, value in named.items()}, []
    for optimiser, parameter, keys in _wanted(each):
        stored = {key: tensors.get(f"{names[id(parameter)]}.{key}") for key in keys}
        missing += [f"{names[id(parameter)]}.{key}" for key, value in stored.items() if value is None]
        optimiser.state[parameter] = {
            key: _moment(key, parameter, value) for key, value in stored.items() if value is not None
        }
    if missing:
        raise CheckpointError(f"{len(missing)} optimiser tensors are missing: {', '.join(missing[:4])}")


def empty_state(each: Sequence[torch.optim.Optimizer], named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Set all that the optimisers remember to zeros -> the same tensors by name, to be filled in place."""
    for optimiser, parameter, keys in _wanted(each):
        optimiser.state[parameter] = {key: _moment(key, parameter) for key in keys}
    return state_tensors(each, named)


def _moment(key: str, parameter: nn.Parameter, value: Tensor | None = None) -> Tensor:
    """One tensor of a parameter's state, of zeros or from a whole one, cut as the optimiser has it."""
    if key == "step":
        return torch.zeros((), device=parameter.device) if value is None else value.to(parameter.device)
    cut = torch.zeros_like(parameter) if value is None else like(value.to(parameter.device), parameter)
    return undivided(cut) if key == "momentum_buffer" else cut  # Muon's are whole, as its gradients are


def _wanted(
    each: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter, tuple[str, ...]]]:
    for optimiser in each:
        is_muon = isinstance(optimiser, torch.optim.Muon)
        keys = ("momentum_buffer",) if is_muon else ("step", "exp_avg", "exp_avg_sq")
        yield from ((optimiser, value, keys) for group in optimiser.param_groups for value in group["params"])


def _is_inner_matrix(name: str, value: nn.Parameter) -> bool:
    # Muon is for matrices between hidden states; embeddings, output heads and routers stay with AdamW.
    return value.ndim == 2 and not any(part in name for part in ("embed_tokens", "lm_head", "gate.weight"))
