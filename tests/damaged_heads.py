"""Heads without a wrong convention that draft badly: damaged, hardly trained, or of a trunk that has changed."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.head import Head
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import Model
from nextn.train.init_head import init_head

Language = Callable[[int], Tensor]  # seed -> [B, T] tokens

_GROUP = 32  # values per scale of a quantized matrix


def own_head(model: Model) -> Model:
    """Copy the head; the trunk, and so its texts, are shared."""
    return replace(model, head=copy.deepcopy(model.head, {id(model.trunk): model.trunk}), backends={})


def _matrices(head: Head) -> list[Tensor]:
    return [value for value in head.parameters() if value.ndim > 1]


def _noise(amount: float, head: Head, generator: torch.Generator) -> None:
    for value in _matrices(head):
        value.add_(torch.randn(value.shape, generator=generator), alpha=amount * float(value.std()))


def _quantize(bits: int, head: Head, generator: torch.Generator) -> None:
    """Round to nearest, with one scale per 32 values, or per row where that does not divide it."""
    for value in _matrices(head):
        groups = value.view(-1, _GROUP) if value.shape[-1] % _GROUP == 0 else value
        scale = (groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-12)
        groups.copy_((groups / scale).round() * scale)


def _shuffle_rows(head: Head, generator: torch.Generator) -> None:
    matrices = _matrices(head)
    value = matrices[int(torch.randint(len(matrices), (1,), generator=generator))]
    value.copy_(value[torch.randperm(len(value), generator=generator)])


def _zero_norm(head: Head, generator: torch.Generator) -> None:
    norms = [value for name, value in head.named_parameters() if "norm" in name and value.ndim == 1]
    norms[int(torch.randint(len(norms), (1,), generator=generator))].zero_()


def _copy_block(head: Head, generator: torch.Generator) -> None:
    """Replace the decoder layers by copies of the trunk's last layers of the same structure."""
    for module in head.stack:
        for layer in module.layers:
            forms = {name: value.shape for name, value in layer.state_dict().items()}
            for source in reversed(head.trunk.decoder.layers):
                state = source.state_dict()
                if {name: value.shape for name, value in state.items()} == forms:
                    layer.load_state_dict(state)
                    break


DAMAGES: dict[str, Callable[[Head, torch.Generator], None]] = {
    **{f"noise of {amount:g} std": lambda h, g, amount=amount: _noise(amount, h, g) for amount in (0.1, 0.2, 0.4, 0.8)},
    **{f"{bits} bits": lambda h, g, bits=bits: _quantize(bits, h, g) for bits in (4, 3, 2)},
    "copied block": _copy_block,
    "shuffled rows": _shuffle_rows,
    "zeroed norm": _zero_norm,
}


def damaged(model: Model, damage: str, seed: int) -> Model:
    """Return the model with a copy of its head, damaged."""
    model = own_head(model)
    with torch.no_grad():
        DAMAGES[damage](model.head, torch.Generator().manual_seed(seed))
    return model


def undertrained(
    model: Model, language: Language, steps: tuple[int, ...], *, depths: int
) -> Iterator[tuple[int, Model]]:
    """Yield fresh heads of the frozen trunk after this many training steps each; 0: as initialized."""
    head, _ = init_head(model.family, model.trunk, language(0), num_modules=model.head.num_modules)
    fresh = replace(model, head=head, backends={})
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.98))
    for step in range(max(steps) + 1):
        if step in steps:
            yield step, own_head(fresh)
        _train_step(fresh, language(step + 1), list(head.parameters()), optimizer, depths)


def stale(model: Model, language: Language, steps: int, *, lr: float = 1e-3) -> Model:
    """Return the model with a trunk that was trained on in another language, alone."""
    tuned = copy.deepcopy(replace(model, backends={}))
    parameters = list(tuned.trunk.parameters())
    for value in parameters:
        value.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98))
    for step in range(steps):
        _train_step(tuned, language(step + 1), parameters, optimizer, 0)
    return tuned


def _train_step(
    model: Model, tokens: Tensor, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, depths: int
) -> None:
    hidden = model.trunk(tokens)
    states = model.head.teacher_forced_hidden(tokens, hidden.head_input, depths) if depths else []
    weights = lm_head_weights(model.trunk, model.head, depths)
    loss = mtp_loss([hidden.final_hidden, *states], weights, Targets(tokens), lam=1.0)
    for value in parameters:
        value.grad = None
    loss.total.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
