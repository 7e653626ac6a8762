"""The texts that figures are taken over: the trunk's own continuations of the prompts, decoded once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nextn.benchmarking.workload import Prompt
from nextn.corpus.loops import TELLING, degeneracy
from nextn.decode import Round, Settings
from nextn.drafting import Contract
from nextn.figures.acceptance import Acceptance
from nextn.measuring.columns import Text
from nextn.measuring.plan import Plan
from nextn.model import Model
from nextn.sampling import Sampling
from nextn.text import Result, generate

_BATCH = 8  # rows decoded together


@dataclass(frozen=True, eq=False)
class Drawn:
    """The texts of one temperature, and what the decoder counted in each; none where it did not run as asked."""

    texts: tuple[Text, ...]
    counted: tuple[Acceptance, ...]
    pooled: Acceptance | None

    @property
    def looping(self) -> set[int]:
        """Places of the texts that are loops."""
        return {place for place, text in enumerate(self.texts) if degeneracy(text.new).looping}

    @property
    def short(self) -> list[int]:
        """Places of the texts in which loops cannot be told for sure."""
        return [place for place, text in enumerate(self.texts) if len(text.new) < TELLING]


def continued(
    model: Model,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    temperature: float,
    *,
    contract: Contract | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> Drawn:
    """What the trunk goes on with, decoded with the head (it is lossless), and the counts of that decoding: by all bits
    of the head's weights, as other engines would have it."""
    contract = contract or Contract()
    is_drafted = contract.offset <= 0  # nothing could draft with a later state
    results: list[Result] = []
    for start in range(0, len(prompts), _BATCH):
        settings = Settings(
            drafts=plan.drafts,
            sampling=Sampling(temperature),
            max_tokens=plan.max_tokens,
            seed=plan.seed + start,
            contract=contract if is_drafted else Contract(),
            block=plan.rule == "block",
            sampled_drafts=plan.rule != "argmax",
        )
        batch = prompts[start : start + _BATCH]
        with _exact(model):
            results += generate(model, batch, settings, path=plan.path)
        for _ in batch:
            on_text()
    texts = tuple(
        Text(tuple(prompt), each.tokens, temperature, each.finish in ("eos", "context"))
        for prompt, each in zip(prompts, results, strict=True)
    )
    if not is_drafted:
        return Drawn(texts, (), None)
    pooled = Acceptance.of(Round((part,), 0.0, 0.0) for each in results for part in each.rounds)
    return Drawn(texts, tuple(each.acceptance for each in results), pooled)


def tokens_of(model: Model, prompt: Prompt, chat: bool | None) -> tuple[int, ...]:
    """A prompt's ids; chat None: through the chat template where there is one."""
    if chat is None:
        chat = bool(model.tokenizer is not None and model.tokenizer.chat_template)
    return prompt.tokens(model, chat=chat)


@contextmanager
def _exact(model: Model) -> Iterator[None]:
    """While open, the head drafts by all bits of its weights."""
    head = model.head
    assert head is not None
    before, head.exact = head.exact, True
    try:
        yield
    finally:
        head.exact = before
