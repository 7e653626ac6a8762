"""Trains the tiny models under tests/fixtures: `python tests/make_fixtures.py`, about three minutes on one core.

They speak `tiny.refrain`: a random phrase, again and again; `glm_fork`, `tiny.forked`, whose distributions are broad.
Trunk and head learn it together.
"""

import argparse
import time

import torch
from tiny import FIXTURES, build, forked, refrain

from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import Model

_WIDE = {"hidden_size": 64, "vocab_size": 48, "initializer_range": 0.05, "max_position_embeddings": 512}
_GLM = {"head_dim": 16, "intermediate_size": 128, "first_k_dense_replace": 2, "n_routed_experts": 2}
_QWEN = {
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
_V4 = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["moe", "moe"],
    "n_routed_experts": 2,
    "sliding_window": 16,
    "moe_intermediate_size": 64,
}
_STEP = {
    "intermediate_size": 128,
    "share_expert_dim": 16,
    "moe_intermediate_size": 64,
    "head_dim": 16,
    "sliding_window": 48,
}
# name: (family, modules, depths trained, config)
RECIPES: dict[str, tuple[str, int, int, dict[str, object]]] = {
    "glm": ("glm4_moe", 1, 4, _GLM),
    "glm_one": ("glm4_moe", 1, 1, _GLM),
    "glm_two": ("glm4_moe", 2, 2, _GLM),
    "qwen": ("qwen3_5", 1, 4, _QWEN),
    "v4": ("deepseek_v4", 1, 4, _V4),
    "glm_fork": ("glm4_moe", 1, 2, _GLM),
    "step": ("step3p5", 3, 3, _STEP),
}
# Fewer leave a head that is not always right, as those of real models are.
STEPS = {"glm_fork": 800, "step": 500}


@torch.no_grad()
def spread_norm_weights(model: Model) -> None:
    """Norm gains start between about 1/5 and 5, as long training leaves them. All at 1, a norm before and a norm behind
    another are nearly the same, and no test could tell which state a head was given."""
    generator = torch.Generator().manual_seed(1)
    for part in (model.trunk.final_norm, *(module.final_norm for module in model.head.stack)):
        norm_weights = torch.randn(part.weight.shape, generator=generator).mul(0.8).exp()
        part.weight.copy_(norm_weights - float(model.family.norm_weight == "1+w"))


def train(name: str, *, steps: int) -> Model:
    family, modules, depths, changes = RECIPES[name]
    language = forked if name.endswith("_fork") else refrain
    model = build(family, modules=modules, **_WIDE, **changes)
    assert model.head is not None
    weights = lm_head_weights(model.trunk, model.head, depths)
    spread_norm_weights(model)
    parameters = [*model.trunk.parameters(), *model.head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        tokens = language(32, 64, seed=step + 1)
        hidden = model.trunk(tokens)
        hiddens = [hidden.final_hidden, *model.head.teacher_forced_hidden(tokens, hidden.head_input, depths)]
        report = mtp_loss(hiddens, weights, Targets(tokens), lam=1.0)
        optimizer.zero_grad()
        report.total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(name, step + 1, [round(loss, 3) for loss in report.per_depth.tolist()], flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RECIPES))
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        started = time.perf_counter()
        model = train(name, steps=args.steps or STEPS.get(name, 1500))
        model.save(FIXTURES / name, dtype=torch.bfloat16, copies=False)
        print(name, f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
