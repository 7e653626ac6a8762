"""`nextn accuracy`: how far each way to run a model is from the model in float32."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from nextn.cli.common import AsJson, expanded, shipped_path
from nextn.cli.model_options import ModelOptions
from nextn.cli.progress import progress_bars
from nextn.cli.screen import figures_table, plain, print_json, print_lines, print_note, print_notes, print_table
from nextn.cli.streaming import reason_to_stream
from nextn.errors import ConfigError
from nextn.settings import BACKENDS, WEIGHTS

if TYPE_CHECKING:
    from nextn.evaluate.accuracy import Candidate, ComparedTexts, Reference
    from nextn.model.model import Model

TOKENS = 1536


@expanded("exact_head", "backend", "weights", "threads", "kv_cache_dtype", "device", "device_map", "head")
def accuracy(
    *,
    others: Annotated[
        list[str] | None, Argument(help="Other forms of the model, such as a quantized folder or .gguf files.")
    ] = None,
    weights: Annotated[
        str, Option(help=f"Of the products, comma-separated, of {', '.join(WEIGHTS)}.")
    ] = "stored,int8,int4",
    backend: Annotated[str, Option(help="Comma-separated, of auto, native, torch.")] = "auto",
    options: ModelOptions,
    texts: Annotated[
        str | None,
        Option(help="File of text or records, or a data set. Default: Python's documentation, as help() has it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model's next-token distributions with those in float32, at every bit width, backend and file."""
    choices = _choices(options, others or (), weights, backend)
    if texts is not None:
        from nextn.data.sources import check_sources

        check_sources([texts])
    reference, compared = _reference(choices[0], texts, quiet=as_json)
    with progress_bars(quiet=as_json) as progress:
        found = [_candidate(each, reference, progress(_name(each), compared.num_tokens)) for each in choices]
    record: dict[str, object] = {"texts": compared.as_record(), "reference": choices[0].source}
    record |= {"figures": [each.as_record() for each in found]}
    if as_json:
        print_json(record)
    else:
        _show(found, compared)


def accuracy_of(loaded: "Model", options: ModelOptions, *, quiet: bool) -> "tuple[Candidate, str] | None":
    """Return how far a loaded model is from itself in float32, and what it was compared on.

    None if its products are of 16 bits or more, or, with a note, if it has no tokenizer for the built-in text.
    """
    from nextn.evaluate.accuracy import Candidate
    from nextn.model.packed_experts import weights_with_codes

    if loaded.trunk.weights == WEIGHTS[0] and not any(weights_with_codes(loaded.trunk)):
        return None
    if loaded.tokenizer is None:
        print_note(
            "what the weights of few bits cost in accuracy was not measured, as the checkpoint has no "
            "tokenizer; nextn accuracy --texts reads token ids"
        )
        return None
    reference, compared = _reference(options, None, quiet=quiet)
    with progress_bars(quiet=quiet) as progress:
        step = progress("accuracy", compared.num_tokens)
        found = Candidate.of(loaded, reference, source=options.given, backend=options.backend, on_position=step)
    return found, compared.source


def _choices(options: ModelOptions, others: Sequence[str], weights: str, backend: str) -> list[ModelOptions]:
    """Return every way that is asked for, less weights of few bits in torch, which has none. Raises ConfigError."""
    lists = _listed("--weights", weights, WEIGHTS), _listed("--backend", backend, BACKENDS)
    sources = [options, *(replace(options, source=shipped_path(source)) for source in others)]
    stored, ways = WEIGHTS[0], list(product(*lists))
    usable = [way for way in ways if way[0] == stored or way[1] != "torch"]
    if not usable:
        raise ConfigError(f"--weights {weights} --backend {backend}: only the native backend has other than {stored}")
    prepared = [each.prepared() for each in sources]
    chosen = [replace(each, weights=width, backend=name) for each in prepared for width, name in usable]
    for each in chosen:
        each.check()
    return chosen


def _listed(name: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    values = tuple(dict.fromkeys(text.split(",")))
    if wrong := [value for value in values if value not in known]:
        raise ConfigError(f"{name} {text!r}: {wrong[0]!r}; expected some of {', '.join(known)}, comma-separated")
    return values


def _reference(options: ModelOptions, texts: str | None, *, quiet: bool) -> "tuple[Reference, ComparedTexts]":
    """Run the model in float32, each layer read once for all texts, so that no model is too large."""
    from nextn.evaluate.accuracy import CONTEXT, Reference, compared_texts

    loaded = replace(options, dtype="float32", weights="stored", backend="auto").load(need_head=False, stream=True)
    context = min(CONTEXT, loaded.trunk.max_length or CONTEXT)
    compared = compared_texts(loaded.tokenizer, texts, num_tokens=TOKENS, context=context)
    with progress_bars(quiet=quiet) as progress:
        step = progress("layers in float32", loaded.trunk.num_layers)
        return Reference.of(loaded.trunk, compared.tokens, on_layer=lambda _: step()), compared


def _candidate(options: ModelOptions, reference: "Reference", step: "Callable[..., None]") -> "Candidate":
    from nextn.evaluate.accuracy import Candidate

    if (reason := reason_to_stream(replace(options, device="cpu"), None)) is not None:
        raise ConfigError(f"{options.source}: {reason}; compare it on a larger machine")
    loaded = options.load(need_head=False)
    print_notes(loaded.notes)
    return Candidate.of(loaded, reference, source=options.given, backend=options.backend, on_position=step)


def _show(found: "Sequence[Candidate]", compared: "ComparedTexts") -> None:
    titles = ("model", "weights", "backend", "MB/step", "KL mean", "KL p99", "same argmax", "perplexity", "ties")
    table = figures_table(*titles, left=titles[:3])
    for each in found:
        figures, name = each.accuracy, each.dtype if each.weights == WEIGHTS[0] else each.weights
        table.add_row(
            plain(Path(each.source).name),
            plain(name),
            each.backend,
            f"{each.step_bytes / 1e6:.3g}",
            f"{figures.kl_mean:.2g}",
            f"{figures.kl_p99:.2g}",
            f"{figures.same_argmax:.2%}",
            f"x {figures.perplexity_ratio:.4f}",
            f"{figures.ties:.2%}",
        )
    print_table(table)
    first = found[0].accuracy
    print_lines(
        f"{first.positions} positions of {compared.source}, beside the first model in float32 (perplexity "
        f"{first.perplexity:.2f}); KL in nats"
    )


def _name(options: ModelOptions) -> str:
    return f"{Path(options.given).name} {options.weights} {options.backend}"
