"""The verb `nextn answer`: the trunk's own answers to prompts, as text to train a head on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, Chat, Device, Dtype, MaxTokens, PathName, check_model, load_model, stop_flag
from nextn.cli.screen import console, echo, print_json, print_note
from nextn.settings import Sampling, Settings

if TYPE_CHECKING:
    from nextn.training.answers import Tally


def answer(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    out: Annotated[Path, typer.Argument(help="The .jsonl file of answers; one that is there is gone on with.")],
    prompts: Annotated[
        list[str],
        typer.Option(help="Text files or folders, .jsonl, .parquet, or a data set; may be repeated."),
    ],
    count: Annotated[
        int | None, typer.Option(help="Prompts: the first of the records, then pieces cut from texts; all if left out.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of each prompt that is cut from a text.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off.")] = 1.0,
    max_tokens: MaxTokens = 512,
    drafts: Annotated[int, typer.Option("--drafts", "-k", help="Tokens drafted per round, if there is a head.")] = 4,
    batch: Annotated[int, typer.Option(help="Prompts that are answered together.")] = 8,
    seed: int = 0,
    chat: Chat = False,
    dtype: Dtype = "auto",
    path: PathName = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Let the trunk answer prompts, to train a head on its answers; after Ctrl-C, the same command goes on."""
    sampling = Sampling(temperature, top_k, top_p)
    settings = Settings(drafts=drafts, sampling=sampling, max_tokens=max_tokens, seed=seed)
    check_model(model, dtype, path=path, device=device)
    from nextn.corpus.corpus_files import check_sources

    check_sources(prompts)
    from nextn.training.answers import answer as answered
    from nextn.training.answers import read_prompts

    loaded = load_model(model, dtype, need_head=False, device=device)
    asked, notes = read_prompts(prompts, loaded, count=count, length=length, seed=seed, chat=chat)
    for note in notes:
        print_note(note)
    with stop_flag() as stopped, _progress(quiet=as_json) as show:
        told = None
        for told in answered(loaded, asked, settings, out, batch_size=batch, path=path, should_stop=stopped):
            show(told)
    assert told is not None
    if as_json:
        print_json(told.as_record() | {"file": str(out)})
    else:
        echo(_summary(told, out))
    if told.answers < told.total:
        echo("stopped; the same command goes on", err=True)
        raise typer.Exit(130)


def _summary(told: "Tally", out: Path) -> str:
    ends = ", ".join(f"{count} {reason}" for reason, count in told.finishes.most_common())
    lines = [f"{out}: {told.answers} of {told.total} answers, {told.tokens:,} tokens ({ends or 'none yet'})"]
    if told.looping:
        lines.append(
            f"note: {told.looping} answers ({told.looping / told.answers:.0%}) repeat themselves; a head that learns "
            "from many loops drafts loops: try a higher temperature or other prompts"
        )
    return "\n".join(lines)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[["Tally"], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    with Progress(*columns, console=console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("answers", total=None, told="")

        def show(tally: "Tally") -> None:
            told = f"{tally.tokens_per_s:,.0f} tok/s, {tally.looping} loop" if tally.tokens_per_s else ""
            bar.update(task, completed=tally.answers, total=max(tally.total, tally.answers), told=told)

        yield show
