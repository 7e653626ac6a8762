"""`nextn generate`: one prompt decoded with MTP, drafts that were kept in green."""

import json
import sys
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
    console,
    draft_from,
    load_model,
    plain,
)  # fmt: skip

if TYPE_CHECKING:
    from nextn.decode import Round, Settings
    from nextn.model import Model
    from nextn.policy import DraftLength


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
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Decode one prompt with MTP; kept drafts are coloured, and the acceptance is printed below."""
    from nextn.decode import Settings
    from nextn.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    settings = Settings(
        drafts=drafts,
        p_min=p_min,
        sampling=sampling,
        sampled_drafts=not argmax_drafts,
        max_tokens=max_tokens,
        seed=seed,
    )
    loaded = load_model(model, dtype, need_head=drafts > 0, device=device, exact_head=exact_head)
    draft_from(loaded, draft_vocab, draft_text)
    text = sys.stdin.read() if prompt == "-" else prompt
    length = _adaptive(loaded, drafts, path) if adaptive else None
    how = {"stop": stop or [], "chat": chat, "path": path, "length": length}
    if as_json:
        typer.echo(json.dumps(_decoded(loaded, text, settings, how)))
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
    return record | times | said | result.acceptance.as_record()


def _show(model: "Model", text: str, settings: "Settings", how: dict[str, Any]) -> None:
    """The text as it comes, then its figures."""
    from nextn.text import stream

    screen = console()
    log: list[Round] = []
    for note in model.notes:
        typer.echo(f"note: {note}", err=True)
    for chunk in stream(model, [text], settings, **how, on_round=log.append):
        kept = bool(chunk.part.kept)
        screen.print(plain(chunk.text, style="green" if kept else None), end="", soft_wrap=True, highlight=False)
    made = model.engine(how["path"])
    if made.reason and how["path"] == "auto":
        typer.echo(f"\nnote: plain path: {made.reason}", err=True)
    adapted = "" if how["length"] is None else f"  {how['length'].reason} "
    screen.print(f"\n[dim]{_speed(log)} on the {made.path} path{adapted}  {_acceptance(log)}[/dim]")


def _speed(log: "Sequence[Round]") -> str:
    """Of all rounds behind the prefill."""
    seconds = sum(each.draft_s + each.verify_s for each in log[1:])
    tokens = sum(len(each.rows[0].emitted) for each in log[1:])
    return f"{tokens / seconds:.0f} tokens/s" if seconds else "one token"


def _acceptance(log: "Sequence[Round]") -> str:
    from nextn.figures.acceptance import Acceptance

    figures = Acceptance.of(log)
    rates = "  ".join(f"a_{depth} {rate:.2f}" for depth, rate in enumerate(figures.rates, 1))
    return f"AL {figures.length:.2f}  {rates}" if figures.num_rounds else "plain"
