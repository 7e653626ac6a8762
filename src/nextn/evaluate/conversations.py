"""Conversations of several turns, played turn by turn with the model's own answers."""

from collections.abc import Sequence
from dataclasses import replace

from nextn.data.chat_template import apply_chat_template
from nextn.decoding.generate import generate
from nextn.errors import ConfigError
from nextn.evaluate.reference_texts import BATCH, prompt_tokens
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.model.model import Model
from nextn.settings import Settings


def play_turns(model: Model, prompts: Sequence[Prompt], plan: ReferencePlan) -> list[Prompt]:
    """Return one prompt per turn: first all first turns in order, then the second ones as token ids, and so on.

    Between turns the model answers greedily, so that a conversation is the same at every temperature.

    Raises:
        ConfigError: There are several turns, and no chat template, or it refuses the conversation.
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
