"""Optimizers of a run: AdamW and Muon per parameter, their learning rates, and their state as named tensors.

`Muon32` is for processors without fast bfloat16 matmuls, on which torch's own Muon takes most of a step.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from nextn.devices import half_precision_pays
from nextn.errors import CheckpointError
from nextn.train.config import TrainConfig, part_of
from nextn.train.distributed import gather_gradients, replicated, shard_like

_NOT_HIDDEN = re.compile(r"embed|lm_head|gate\.weight$|\.router\.")
_STEPS, _COEFFICIENTS, _SMALLEST = 5, (3.4445, -4.7750, 2.0315), 1e-7  # torch.optim.Muon's


class Muon32(torch.optim.Muon):
    """`torch.optim.Muon` with orthogonalization in float32; torch's uses bfloat16 on any machine.

    Learning rates follow `adjust_lr_fn="match_rms_adamw"`; the state has torch's format.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
            for value in group["params"]:
                if value.grad is None:
                    continue
                if "momentum_buffer" not in self.state[value]:
                    self.state[value]["momentum_buffer"] = torch.zeros_like(value.grad)
                moment = self.state[value]["momentum_buffer"]
                moment.lerp_(value.grad, 1 - momentum)
                update = orthogonalize(value.grad.lerp(moment, momentum))
                value.mul_(1 - rate * decay).add_(update, alpha=-rate * 0.2 * sqrt(max(value.shape)))
        return loss


def orthogonalize(matrix: Tensor) -> Tensor:
    """Move all singular values of matrix [n, m] near 1, in its dtype, by the Newton-Schulz steps of torch.optim.Muon.

    See https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=_SMALLEST)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


def build_optimizers(named: Mapping[str, nn.Parameter], config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Build AdamW, and Muon for hidden matrices if the config says so, over the parameters that require gradients."""
    named = {name: value for name, value in named.items() if value.requires_grad}
    matrices = [value for name, value in named.items() if config.optimizer == "muon" and _is_hidden_matrix(name, value)]
    matrix_ids = {id(value) for value in matrices}
    rest = [value for value in named.values() if id(value) not in matrix_ids]
    # No decay of norm weights and biases: weight decay is not meant to pull a norm weight to 0 (or 1 + w to 1).
    groups = [
        {"params": [value for value in rest if value.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [value for value in rest if value.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)]
    if matrices:
        has_fast_bf16 = half_precision_pays(matrices[0].device.type)
        muon = (torch.optim.Muon if has_fast_bf16 else Muon32)(
            matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        muon.register_step_pre_hook(gather_gradients)
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def set_learning_rates(optimizers: Sequence[torch.optim.Optimizer], scale: float) -> None:
    """Set learning rates to `scale` times their initial values."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale


def state_tensors(optimizers: Sequence[torch.optim.Optimizer], named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizers' state as `<parameter>.<key>` -> tensor."""
    names = {id(value): name for name, value in named.items()}
    return {
        f"{names[id(parameter)]}.{key}": torch.as_tensor(value)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the bytes of `state_tensors`, also before the first step."""
    return sum(value.nbytes * (len(keys) - ("step" in keys)) for _, value, keys in _state_keys(optimizers))


def load_state_tensors(
    optimizers: Sequence[torch.optim.Optimizer], named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Invert `state_tensors`, from unsharded tensors. Raises CheckpointError naming missing tensors."""
    names, missing = {id(value): name for name, value in named.items()}, []
    for optimizer, parameter, keys in _state_keys(optimizers):
        stored = {key: tensors.get(f"{names[id(parameter)]}.{key}") for key in keys}
        missing += [f"{names[id(parameter)]}.{key}" for key, value in stored.items() if value is None]
        optimizer.state[parameter] = {
            key: _state_tensor(key, parameter, value) for key, value in stored.items() if value is not None
        }
    if missing:
        raise CheckpointError(f"{len(missing)} optimizer tensors are missing: {', '.join(missing[:4])}")


def zero_state(optimizers: Sequence[torch.optim.Optimizer], named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Set the optimizers' state to zeros and return its tensors by name, to be filled in place."""
    for optimizer, parameter, keys in _state_keys(optimizers):
        optimizer.state[parameter] = {key: _state_tensor(key, parameter) for key in keys}
    return state_tensors(optimizers, named)


def _state_tensor(key: str, parameter: nn.Parameter, value: Tensor | None = None) -> Tensor:
    """One tensor of a parameter's state, zeros or from an unsharded value, sharded as the optimizer has it."""
    if key == "step":
        return torch.zeros((), device=parameter.device) if value is None else value.to(parameter.device)
    tensor = torch.zeros_like(parameter) if value is None else shard_like(value.to(parameter.device), parameter)
    return replicated(tensor) if key == "momentum_buffer" else tensor  # Muon's are replicated, like its gradients


def _state_keys(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter, tuple[str, ...]]]:
    for optimizer in optimizers:
        is_muon = isinstance(optimizer, torch.optim.Muon)
        keys = ("momentum_buffer",) if is_muon else ("step", "exp_avg", "exp_avg_sq")
        yield from ((optimizer, value, keys) for group in optimizer.param_groups for value in group["params"])


def _is_hidden_matrix(name: str, value: nn.Parameter) -> bool:
    # Muon is for matrices between hidden states; embeddings, lm_heads and routers stay with AdamW.
    is_other = _NOT_HIDDEN.search(name) or part_of(name.removeprefix("head.")) in ("embed_tokens", "lm_head", "router")
    return value.ndim == 2 and not is_other
