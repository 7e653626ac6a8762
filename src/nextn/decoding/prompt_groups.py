"""Which prompts are prefilled together: padding to the longest one costs as much as prompts do."""

from collections.abc import Sequence

# What a pass costs beside its positions, as a number of positions: reading the weights, on a GPU also the launches.
_CPU_PASS, _GPU_PASS = 32, 1024


def prompt_groups(lengths: Sequence[int], chunk: int, *, on_cpu: bool, one_by_one: bool) -> list[list[int]]:
    """Return the prompts (indices) of each group to prefill by itself, longest first; one group where that is cheaper.

    A group's padding costs no more than a pass. chunk: The positions of a pass. one_by_one: Groups are single prompts.
    """
    pass_cost, padding = _CPU_PASS if on_cpu else _GPU_PASS, 0
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        padding += lengths[groups[-1][0]] - lengths[row] if groups else 0
        if groups and padding <= pass_cost and not one_by_one:
            groups[-1].append(row)
        else:
            groups.append([row])
            padding = 0

    def cost(group: Sequence[int]) -> int:
        longest = max(lengths[row] for row in group)
        return -(-longest // chunk) * pass_cost + len(group) * longest

    whole = list(range(len(lengths)))
    return groups if sum(map(cost, groups)) < cost(whole) else [whole]
