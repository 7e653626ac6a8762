"""The texts of a reference measurement, which are the trunk's own continuations of the prompts, and its controls.

Controls are acceptances that should be near 0; their warnings say what it means if they are not. Conversations are
played turn by turn with the model's own answers.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from nextn.data.chat_template import apply_chat_template
from nextn.data.degeneracy import MIN_TOKENS, degeneracy
from nextn.decoding.generate import Result, generate
from nextn.decoding.records import Round
from nextn.errors import ConfigError
from nextn.evaluate.teacher_forced import ReferenceText, ScoredText, score_texts
from nextn.evaluate.workload import BenchmarkPlan, Prompt, ReferencePlan
from nextn.model.model import Model
from nextn.model.text_interface import TextInterface
from nextn.model.trunk import TrunkOutput
from nextn.settings import Contract, Sampling, Settings
from nextn.stats.acceptance import Acceptance

BATCH = 8  # sequences decoded together
_HIGH_CONTROL = 0.1  # a control above: the texts repeat themselves, or the head ignores its inputs
_LOW_ACCEPTANCE = 0.2


@dataclass(frozen=True, eq=False)
class GeneratedTexts:
    """The texts of one temperature."""

    texts: tuple[ReferenceText, ...]
    acceptance_per_text: tuple[Acceptance, ...]  # as decoded; () if not decoded under the contract in question
    pooled: Acceptance | None  # the same over all texts
    steps: tuple[tuple[tuple[int, int], ...], ...] = ()  # as decoded: (drafts, accepted) of each text's rounds

    @property
    def repetitive(self) -> set[int]:
        """Indices of repetitive texts."""
        return {index for index, text in enumerate(self.texts) if degeneracy(text.new).is_degenerate}

    @property
    def short(self) -> list[int]:
        """Indices of texts too short to detect repetition."""
        return [index for index, text in enumerate(self.texts) if len(text.new) < MIN_TOKENS]


def generate_texts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    plan: ReferencePlan,
    temperature: float,
    *,
    contract: Contract | None = None,
    on_text: Callable[[float], None] = lambda num_texts: None,
) -> GeneratedTexts:
    """Continue the prompts with the trunk, decoding with the head (it is lossless), and count its acceptance.

    The head drafts by all bits of its weights, as other engines would. `contract` injects faults of decoding. `on_text`
    is called after each round with what it decoded, in texts.
    """
    contract = contract or Contract()
    can_draft = contract.offset <= 0  # a later hidden state is not known when drafting
    results: list[Result] = []
    for start in range(0, len(prompts), BATCH):
        settings = Settings(
            num_speculative_tokens=plan.num_speculative_tokens,
            sampling=Sampling(temperature),
            max_tokens=plan.max_tokens,
            seed=plan.seed + start,
            contract=contract if can_draft else Contract(),
            block_verification=plan.rule == "block",
            sampled_drafts=plan.rule != "argmax",
        )
        batch = prompts[start : start + BATCH]
        with exact_head(model):
            results += generate(
                model, batch, settings, backend=plan.backend, on_round=_in_texts(len(batch), plan.max_tokens, on_text)
            )
    texts = tuple(
        ReferenceText(tuple(prompt), result.tokens, temperature, result.finish in ("eos", "context"))
        for prompt, result in zip(prompts, results, strict=True)
    )
    if not can_draft:
        return GeneratedTexts(texts, (), None)
    pooled = Acceptance.of(Round((part,), 0.0, 0.0) for result in results for part in result.rounds)
    drafting = ((part for part in result.rounds if part.drafts) for result in results)
    steps = tuple(tuple((len(part.drafts), part.num_accepted) for part in parts) for parts in drafting)
    return GeneratedTexts(texts, tuple(result.acceptance for result in results), pooled, steps)


def _in_texts(num_texts: int, max_tokens: int, on_text: Callable[[float], None]) -> Callable[[Round], None]:
    """Return a callback that says how much of a batch of texts each round decoded; a text that ended is one."""
    tokens = [0] * num_texts

    def add(result: Round) -> None:
        before = sum(tokens)
        for each in result.rows:
            tokens[each.row] = max_tokens if each.finish else tokens[each.row] + len(each.emitted)
        on_text((sum(tokens) - before) / max_tokens)

    return add


def prompt_tokens(model: Model | TextInterface, prompt: Prompt, plan: ReferencePlan | BenchmarkPlan) -> tuple[int, ...]:
    """Return a prompt's token ids, as the plan uses the chat template."""
    has_template = bool(model.tokenizer is not None and model.tokenizer.chat_template)
    chat = has_template if plan.chat is None else plan.chat
    return prompt.tokens(model, chat=chat, variables=plan.template_variables)


def check_thinking(model: Model | TextInterface, plan: ReferencePlan | BenchmarkPlan) -> None:
    """Raise ConfigError if the plan sets a thinking mode that the checkpoint's chat template does not have."""
    if plan.thinking is None:
        return
    probe, other = Prompt("Hello.", ""), replace(plan, thinking=not plan.thinking)
    if plan.chat is False or prompt_tokens(model, probe, plan) == prompt_tokens(model, probe, other):
        raise ConfigError(
            "--thinking or --no-thinking: the chat template renders a prompt alike with both, or is not used; leave "
            "the option out"
        )


@contextmanager
def exact_head(model: Model) -> Iterator[None]:
    """While open, the head drafts by all bits of its weights."""
    head = model.head
    assert head is not None
    before, head.exact = head.exact, True
    try:
        yield
    finally:
        head.exact = before


@dataclass(frozen=True)
class Controls:
    """Control measurements; see `reference_report.DEFINITIONS`."""

    all_positions: float  # a_1 over all positions alike, to compare with
    shifted: float  # share of drafts that equal the token after the one they predict; near 0
    shuffled: float  # a_1 with hidden states in random order; near 0
    chance: float  # probability that a draft equals a token by accident
    median_rank: float  # median number of tokens that depth 1 ranks above the text's
    distinct_drafts: int
    vocab_size: int

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the figures, or reasons why they are low."""
        warnings = []
        if self.shifted > self.chance + _HIGH_CONTROL:
            warnings.append(
                f"control: {self.shifted:.0%} of the drafts equal the token after the one that they predict (near 0 in "
                f"text that does not repeat itself; {self.chance:.0%} by accident): the texts are easy to draft"
            )
        if self.shuffled > max(_HIGH_CONTROL, (self.all_positions + self.chance) / 2):
            warnings.append(
                f"control: {self.shuffled:.0%} are accepted with hidden states in random order, "
                f"{self.all_positions:.0%} in the right one: the head hardly uses them, or the texts are easy to draft"
            )
        if self.all_positions >= _LOW_ACCEPTANCE:
            return warnings
        if self.distinct_drafts == 1:
            warnings.append("the head drafts one token for every input: its weights are not those that were trained")
        if self.median_rank > 0.9 * self.vocab_size:
            warnings.append(
                f"the text's token has median rank {self.median_rank:.0f} of {self.vocab_size} at depth 1, worse than "
                "chance: typical of norm weights read as w instead of 1 + w, or the reverse; --probe tries both"
            )
        else:
            warnings.append(
                f"acceptance is low; the text's token has median rank {self.median_rank:.0f} of {self.vocab_size} at "
                "depth 1; --probe tries other conventions of the weights"
            )
        return warnings


def measure_controls(
    model: Model, scored: Sequence[ScoredText], hiddens: Sequence[TrunkOutput], rule: str, *, contract: Contract
) -> Controls:
    """Measure the controls on texts that were scored under the contract; `hiddens` are their `trunk_outputs`."""
    texts = [each.text for each in scored]
    shuffled = [_shuffled(hidden) for hidden in hiddens]
    drafts: list[int] = []
    tokens: list[int] = []
    next_tokens: list[int | None] = []
    for each in scored:
        count = min(len(each.drafts), len(each.text.new) - 1)
        drafts += each.drafts.tolist()[:count]
        tokens += each.text.new[1 : count + 1]
        next_tokens += [*each.text.new[2:], None][:count]
    ranks = [rank for each in scored for rank in each.ranks.tolist()]
    return Controls(
        all_positions=_acceptance_over_positions(scored, rule),
        shifted=sum(a == b for a, b in zip(drafts, next_tokens, strict=True)) / max(1, len(drafts)),
        shuffled=_acceptance_over_positions([*score_texts(model, texts, shuffled, 1, contract=contract)], rule),
        chance=_chance(drafts, tokens),
        median_rank=statistics.median(ranks) if ranks else 0.0,
        distinct_drafts=len(set(drafts)),
        vocab_size=model.trunk.vocab_size,
    )


def _acceptance_over_positions(scored: Sequence[ScoredText], rule: str) -> float:
    probs: list[float] = [value for each in scored for value in each.survivals[rule].expected[:, 0].tolist()]
    return sum(probs) / max(1, len(probs))


def _shuffled(hidden: TrunkOutput) -> TrunkOutput:
    """The text's states in random order, those of the prompt included: they carry no information any more."""
    order = torch.randperm(len(hidden.head_input), generator=torch.Generator().manual_seed(0))
    return TrunkOutput(hidden.final_hidden, hidden.head_input[order.to(hidden.head_input.device)])


def _chance(drafts: Sequence[int], tokens: Sequence[int]) -> float:
    if not drafts or not tokens:
        return 0.0
    counts = [torch.tensor(side).bincount(minlength=max(*drafts, *tokens) + 1).double() for side in (drafts, tokens)]
    return float((counts[0] * counts[1]).sum() / len(drafts) / len(tokens))


def play_turns(model: Model, prompts: Sequence[Prompt], plan: ReferencePlan) -> list[Prompt]:
    """Return one prompt per turn: first all first turns in order, then the second ones as token ids, and so on.

    Between turns the model answers greedily, so that a conversation is the same at every temperature. Raises
    ConfigError for several turns without a chat template, or one that refuses the conversation.
    """
    played = [replace(prompt, later=(), conversation=index) for index, prompt in enumerate(prompts)]
    current = {index: prompt_tokens(model, prompt, plan) for index, prompt in enumerate(prompts) if prompt.later}
    if not current:
        return list(prompts)
    tokenizer = model.tokenizer
    if plan.chat is False or tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            f"{len(current)} of {len(prompts)} prompts are conversations of several turns, which take a chat template: "
            "use a checkpoint with one, without --no-chat, or a file of single prompts"
        )
    messages = {index: [_message("user", str(prompts[index].text))] for index in current}
    for turn in range(max(len(prompt.later) for prompt in prompts)):
        current = {index: ids for index, ids in current.items() if turn < len(prompts[index].later)}
        answers = _answer(model, list(current.values()), plan)
        for index, answer in zip(current, answers, strict=True):
            text = tokenizer.decode(list(answer), skip_special_tokens=True)
            messages[index] += [_message("assistant", text), _message("user", prompts[index].later[turn])]
            current[index] = tuple(apply_chat_template(
                tokenizer, messages[index], add_generation_prompt=True, variables=plan.template_variables
            )[0])  # fmt: skip
            turns = (str(prompts[index].text), *prompts[index].later[: turn + 1])
            played.append(Prompt(current[index], prompts[index].domain, conversation=index, turns=turns))
    return played


def _answer(model: Model, prompts: Sequence[Sequence[int]], plan: ReferencePlan) -> list[tuple[int, ...]]:
    drafts = 0 if model.head is None else plan.num_speculative_tokens
    settings = Settings(num_speculative_tokens=drafts, max_tokens=plan.max_tokens, seed=plan.seed)
    batches = (prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH))
    return [result.tokens for batch in batches for result in generate(model, batch, settings, backend=plan.backend)]


def _message(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content}
