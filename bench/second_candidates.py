"""What a second candidate beside each draft would add: the greedy acceptance of chains with and without it.

Where a draft is rejected, the head's second choice of that depth may be the right token. If the same pass had verified
it, too, the round would yield one token more. The texts are the model's own greedy continuations, so that this needs no
tree decoder: rounds are followed along the text as `nextn measure` does. Gains, of a second candidate at each depth and
at the first alone, are upper bounds: attention along branches counts as free. `cost` is what K positions more, or one,
add to a round's time.

`python bench/second_candidates.py MODEL [MODEL ...] [--prompts FILE] [--out FILE]`; a record of other models is kept
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from record import origin, write_record
from torch import Tensor

import nextn
from nextn.evaluate.decoding_costs import measure_costs
from nextn.evaluate.reference_texts import generate_texts, prompt_tokens
from nextn.evaluate.teacher_forced import ReferenceText, trunk_outputs
from nextn.evaluate.workload import ReferencePlan, read_prompts
from nextn.model.model import Model
from nextn.runtime.backend import backend_for


@torch.inference_mode()
def ranks_by_depth(model: Model, text: ReferenceText, depths: int) -> Tensor:
    """Return [S, depths]: how many tokens the head ranks above the text's, by round start and depth."""
    assert model.head is not None
    states = trunk_outputs(backend_for(model, "auto").trunk, [text])[0].head_input
    tokens = torch.tensor(text.tokens)
    first, count = len(text.prompt) - 1, len(text.new) - depths
    hidden = model.head.rollout_hidden(tokens[None], states[None], depths)
    ranks = []
    for depth, states_at_depth in enumerate(hidden, start=1):
        logits = model.head.logits(model.head.layer_index(depth), states_at_depth[0, first : first + count]).float()
        target = tokens[first + 1 + depth : first + 1 + depth + count, None]
        ranks.append((logits > logits.gather(-1, target)).sum(-1))
    return torch.stack(ranks, dim=1)


def follow_rounds(ranks: Tensor, second: int) -> tuple[int, int, list[list[int]]]:
    """Follow rounds along a text.

    Args:
        ranks: [S, depths], see `ranks_by_depth`.
        second: The first drafts, as many as this, have a second candidate beside them.

    Returns:
        Rounds, tokens, and by depth [rejected there, of those the second candidate right].
    """
    starts, depths = ranks.shape
    position = rounds = tokens = 0
    rejected = [[0, 0] for _ in range(depths)]
    while position < starts:
        wrong = (ranks[position] > 0).nonzero().flatten().tolist()
        accepted = wrong[0] if wrong else depths
        gained = 0
        if wrong:
            is_second = int(ranks[position, accepted]) == 1
            rejected[accepted][0] += 1
            rejected[accepted][1] += is_second
            gained = int(accepted < second and is_second)
        rounds, tokens = rounds + 1, tokens + accepted + 1 + gained
        position += accepted + 1 + gained
    return rounds, tokens, rejected


def measure(model: Model, prompts: Path | None, depths: Sequence[int], max_tokens: int) -> list[dict[str, object]]:
    ids = [prompt_tokens(model, prompt, ReferencePlan()) for prompt in read_prompts(prompts)]
    plan = ReferencePlan(num_speculative_tokens=max(depths), temperatures=(0.0,), max_tokens=max_tokens)
    generated = generate_texts(model, ids, plan, 0.0)
    usable = [
        text
        for index, text in enumerate(generated.texts)
        if index not in generated.repetitive and len(text.new) > max(depths)
    ]
    if not usable:
        raise SystemExit("every text repeats itself or is short; give other --prompts or a trained model")
    ranks = [ranks_by_depth(model, text, max(depths)) for text in usable]
    costs = measure_costs(model, num_speculative_tokens=2 * max(depths))
    return [
        {
            "num_texts": len(usable),
            **_figures([each[:, :k] for each in ranks], k),
            "cost": (costs.v[2 * k] + k * costs.c) / (costs.v[k] + k * costs.c) - 1,
            "cost_of_first": (costs.v[k + 1] + k * costs.c) / (costs.v[k] + k * costs.c) - 1,
        }
        for k in depths
    ]


def _figures(ranks: Sequence[Tensor], k: int) -> dict[str, object]:
    chain, first, both = ([follow_rounds(each, second) for each in ranks] for second in (0, 1, k))
    chain_al, first_al, both_al = (
        sum(each[1] for each in run) / sum(each[0] for each in run) for run in (chain, first, both)
    )
    rejected = [[sum(each[2][depth][side] for each in chain) for side in (0, 1)] for depth in range(k)]
    return {
        "K": k,
        "al": chain_al,
        "al_with_second": both_al,
        "al_with_first": first_al,
        "second_is_right": [right / max(1, all_) for all_, right in rejected],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--head", help="of another checkpoint")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, object] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    record |= origin()
    for name in args.models:
        record[Path(name).name] = measured = measure(
            nextn.load(name, head=args.head), args.prompts, (2, 4, 8), args.max_tokens
        )
        print(name, json.dumps(measured, indent=1), flush=True)
    write_record(args.out, record)


if __name__ == "__main__":
    main()
