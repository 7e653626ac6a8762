"""`nextn generate`: one prompt decoded with MTP, accepted drafts marked."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextn.cli.common import (
    AsJson,
    Chat,
    Device,
    Drafts,
    DraftText,
    DraftVocab,
    Dtype,
    ExactHead,
    MaxTokens,
    PathName,
    check_model,
    draft_from,
    load_model,
    read_draft_text,
)  # fmt: skip
from nextn.cli.screen import Marks, console, echo, plain, print_json, print_note, read_stdin
from nextn.settings import Sampling, Settings

if TYPE_CHECKING:
    from nextn.decode import Round
    from nextn.model import Model
    from nextn.policy import DraftLength

_TELLING = 64  # tokens: a shorter text may repeat a few of them and be sound


def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    prompt: Annotated[str, typer.Argument(help="Text to go on with; - reads standard input.")],
    drafts: Drafts = 4,
    max_tokens: MaxTokens = 256,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 = off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 = off.")] = 1.0,
    argmax_drafts: Annotated[bool, typer.Option(help="Draft the head's best token instead of a sample.")] = False,
    p_min: Annotated[float, typer.Option(help="Stop a round's drafts where the head is less sure.")] = 0.0,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="As many drafts a round as pay, up to --drafts.")
    ] = False,
    draft_vocab: DraftVocab = 0,
    draft_text: DraftText = None,
    exact_head: ExactHead = False,
    seed: int = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; may be repeated.")] = None,
    chat: Chat = False,
    dtype: Dtype = "auto",
    path: PathName = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Decode one prompt with MTP; accepted drafts are green (marked otherwise without colors), acceptance is below."""
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    settings = Settings(
        drafts=drafts,
        p_min=p_min,
        sampling=sampling,
        sampled_drafts=not argmax_drafts,
        max_tokens=max_tokens,
        seed=seed,
    )
    check_model(model, dtype, path=path, device=device)
    text = read_stdin() if prompt == "-" else prompt
    frequent = read_draft_text(draft_vocab, draft_text)
    loaded = load_model(model, dtype, need_head=drafts > 0, device=device, exact_head=exact_head)
    draft_from(loaded, draft_vocab, frequent)
    length = _adaptive(loaded, drafts, path) if adaptive else None
    how = {"stop": stop or [], "chat": chat, "path": path, "length": length}
    if as_json:
        print_json(_decoded(loaded, text, settings, how))
    else:
        _show(loaded, text, settings, how)


def _adaptive(model: "Model", drafts: int, path: str) -> "DraftLength":
    from nextn.benchmarking.cost import adaptive

    return adaptive(model, limit=drafts, path=path)


def _decoded(model: "Model", text: str, settings: "Settings", how: dict[str, Any]) -> dict[str, object]:
    """The whole text as what goes into JSON."""
    from nextn.text import generate as whole

    result = whole(model, [text], settings, **how)[0]
    record = {"text": result.text, "tokens": list(result.tokens), "finish": result.finish}
    times = {"prefill_s": result.prefill_s, "draft_s": result.draft_s, "verify_s": result.verify_s}
    made = model.engine(how["path"])
    said = {
        "tokens_per_s": result.tokens_per_s,
        "path": made.path,
        "runtime": made.runtime,
        "head_bits": made.head_bits,
    }
    said["repetitive"] = _is_repetitive(result.tokens)
    return record | times | said | result.acceptance.as_record()


def _show(model: "Model", text: str, settings: "Settings", how: dict[str, Any]) -> None:
    """The text as it comes, then its figures."""
    from nextn.text import stream

    screen = console()
    log: list[Round] = []
    for note in model.notes:
        print_note(note)
    marks = Marks.of(screen)
    for chunk in stream(model, [text], settings, **how, on_round=log.append):
        screen.print(marks.text(chunk.text, accepted=bool(chunk.part.kept)), end="", soft_wrap=True, highlight=False)
    made = model.engine(how["path"])
    if made.reason and how["path"] == "auto":
        echo(f"\nnote: plain path: {made.reason}", err=True)
    adapted = "" if how["length"] is None else f"  {how['length'].reason} "
    said = f"{_speed(log)} on the {made.path} path{adapted}  {_acceptance(log)}{_repetition(log)}"
    screen.print(plain(f"\n{said}", style="dim", lines=True), soft_wrap=True)


def _speed(log: "Sequence[Round]") -> str:
    """Of all rounds behind the prefill."""
    seconds = sum(each.draft_s + each.verify_s for each in log[1:])
    tokens = sum(len(each.rows[0].emitted) for each in log[1:])
    return f"{tokens / seconds:.0f} tokens/s" if seconds else "one token"


def _acceptance(log: "Sequence[Round]") -> str:
    from nextn.figures.acceptance import Acceptance

    figures = Acceptance.of(log)
    rates = "  ".join(f"a_{depth} {rate:.2f}" for depth, rate in enumerate(figures.rates, 1) if rate == rate)
    return f"AL {figures.length:.2f}  {rates}" if figures.num_rounds else "plain"


def _repetition(log: "Sequence[Round]") -> str:
    """What to know about the figures of a degenerate text; nothing for others."""
    tokens = [token for each in log for token in each.rows[0].emitted]
    said = "\nthe text is repetitive, and such text is easy to draft: do not rely on these figures"
    return said if _is_repetitive(tokens) else ""


def _is_repetitive(tokens: "Sequence[int]") -> bool:
    from nextn.corpus.loops import degeneracy

    return len(tokens) >= _TELLING and degeneracy(tokens).looping
