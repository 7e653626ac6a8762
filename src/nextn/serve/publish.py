"""Publish a checkpoint on a hub: its model card with measured acceptance, and one commit with all files."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx2's

from nextn.audit_rules import audit
from nextn.bounded_json import JsonDict, JsonObject, read_json
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import head_fingerprint
from nextn.checkpoint.remote import ADVICE
from nextn.checkpoint.snapshot import folder_of
from nextn.edit.export import draft_command
from nextn.errors import CheckpointError, ConfigError
from nextn.family_table.engine_versions import NAMES, named
from nextn.serve.engine_commands import ENGINES, engine_commands

CARD = "README.md"
_TAGS = ("multi-token-prediction", "speculative-decoding")
_BEGIN, _END = "<!-- nextn push -->", "<!-- / -->"
_RULES = ("greedy", "ratio", "argmax")  # those that engines use


@dataclass(frozen=True)
class Publication:
    """What will be in a repository."""

    folder: Path
    repo: str  # hub id
    card: str = field(repr=False)  # README.md
    files: Mapping[str, int]  # names of the others, with their sizes in bytes


def prepare(
    folder: Path, repo: str, *, measured: Path | None = None, base_model: str | None = None, license: str | None = None
) -> Publication:
    """Check a folder with a checkpoint or a head alone, and write its model card; nothing is uploaded.

    By default, `measured` (the JSON of `nextn measure --out`) is the one in the folder; `base_model`, the hub id of the
    trunk that a head alone needs, is that of the card or the record there; `license`, as the hub names it, is the
    card's. Raises CheckpointError if `audit` finds errors, there is no head, or the figures are of another head;
    ConfigError if figures, license or a needed base model are not known, or the hub id is malformed.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII):
        raise ConfigError(f"{repo}: expected a hub id, org/name")
    checkpoint = Checkpoint.open(folder)
    inventory = Inventory.of(checkpoint)
    if errors := [each for each in audit(checkpoint).findings if each.severity == "error"]:
        raise CheckpointError(f"{folder}: audit finds {errors[0].rule}: {errors[0].found} Fix: {errors[0].fix}")
    if not inventory.own:
        inventory.refuse_draft_model()
        raise CheckpointError(f"{folder}: holds no MTP head; `nextn train` makes one")
    record = _record(folder, measured, inventory)
    old = _card(folder / CARD) if (folder / CARD).is_file() else None
    data: JsonDict = {} if old is None else old.data.to_dict()
    data["license"] = license or data.get("license")
    data["base_model"] = base_model or data.get("base_model") or inventory.base_model
    if not data["license"]:
        raise ConfigError(f"{folder}: its license is not known; give --license, that of the base model")
    if not data["base_model"] and not inventory.layers:
        raise ConfigError(f"{folder}: a head alone, and its base_model is not known; give --base-model, a hub id")
    data["tags"] = list(dict.fromkeys([*(data.get("tags") or ()), *_TAGS]))
    base = data["base_model"][0] if isinstance(data["base_model"], list) else data["base_model"] or ""
    section = "\n".join([_BEGIN, *_section(inventory, repo, base, record), _END])
    body = f"# {repo.partition('/')[2]}\n" if old is None else re.sub(f"{_BEGIN}.*?{_END}\n?", "", old.text, flags=re.S)
    card = f"---\n{_yaml(data)}---\n{body.strip()}\n\n{section}\n"
    files = {name: path.stat().st_size for name, path in sorted(_files(folder_of(checkpoint)))}
    return Publication(folder, repo, card, files)


def upload(publication: Publication, *, private: bool = False, endpoint: str | None = None) -> str:
    """Create the repository if it does not exist, commit card and files at once, and return the commit's address.

    By default, the hub is that of its client's configuration, whose token is used. Raises CheckpointError if the hub
    refuses, or cannot be reached.
    """
    files = [CommitOperationAdd(name, publication.folder / name) for name in publication.files]
    card = CommitOperationAdd(CARD, publication.card.encode())
    api = HfApi(endpoint=endpoint)
    try:
        api.create_repo(publication.repo, private=private, exist_ok=True)
        message = "Checkpoint and its acceptance, by nextn push"
        return str(api.create_commit(publication.repo, [*files, card], commit_message=message).commit_url)
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        advice = ADVICE.get(status) if status in (401, 403) else None
        raise CheckpointError(f"{publication.repo}: not uploaded: {advice or error}") from error


def _card(path: Path) -> ModelCard:
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        return ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except (OSError, ValueError, TypeError, YAMLError) as error:
        reason = f"not a model card, whose metadata is YAML: {' '.join(str(error).split())}"
        raise ConfigError(f"{path}: {reason}; correct or remove it") from error


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != CARD and not any(part.startswith(".") for part in Path(name).parts):
            yield name, path


def _record(folder: Path, given: Path | None, inventory: Inventory) -> JsonObject:
    """The record of `nextn measure`, of this head."""
    paths = sorted(folder.glob("*.json")) if given is None else [given]
    records = {path: each for path in paths if (each := _read(path)).keys() >= {"figures", "hashes", "settings"}}
    if len(records) != 1:
        found = "no record" if not records else f"{len(records)} records"
        quoted = shlex.quote(str(folder))
        model = quoted if inventory.layers else f"MODEL --head {quoted}"
        run = f"run `nextn measure {model} --out {shlex.quote(str(folder / 'acceptance.json'))}`"
        advice = "name one with --measured" if records else run
        raise ConfigError(f"{given or folder}: {found} of `nextn measure`; {advice}")
    path, record = next(iter(records.items()))
    if record["hashes"].get("head") != head_fingerprint(inventory):
        raise CheckpointError(f"{path}: its figures are of another head than that of {folder}; measure this one")
    return record


def _read(path: Path) -> JsonObject:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _yaml(data: JsonObject) -> str:
    """YAML of the card's metadata: JSON values are valid YAML. `inference: false` is a value; "" and [] are not."""
    given = {name: value for name, value in data.items() if value or value is False}
    return "".join(f"{name}: {json.dumps(value, ensure_ascii=False, default=str)}\n" for name, value in given.items())


def _section(inventory: Inventory, repo: str, base: str, record: JsonObject) -> Iterator[str]:
    yield from ("## Multi-Token Prediction", "")
    what = "A checkpoint with a head" if inventory.layers else f"A head for {base}"
    yield f"{what} that drafts tokens for speculative decoding ({inventory.family.title}). Acceptance:"
    yield ""
    yield from _table(record)
    yield ""
    settings, hashes = record["settings"], record["hashes"]
    prints = ", ".join(f"{name} `{digest[:12]}`" for name, digest in hashes.items())
    yield (
        "a_k: share of depth-k drafts accepted among those whose shallower drafts were all accepted, at K = "
        f"{settings['num_speculative_tokens']}, with its 95 % interval. AL: tokens per round. "
        f"{sum(record['domains'].values())} "
        f"prompts, up to {settings['max_tokens']} new tokens each; nextn {record['nextn']}; {prints}."
    )
    yield from (f"- {warning}" for warning in record.get("warnings", ()))
    yield from ("", "## Serve it", "")
    for title, lines in _commands(inventory, repo, base):
        yield from (f"{title}:", "", "```bash", *lines, "```", "")


def _table(record: JsonObject) -> Iterator[str]:
    max_k = record["settings"]["num_speculative_tokens"]
    titles = ["decoding", *(f"a_{k}" for k in range(1, max_k + 1)), "AL"]
    yield f"| {' | '.join(titles)} |"
    yield f"| --- |{' ---: |' * (max_k + 1)}"
    for row in record["figures"]:
        if row["domain"] == "all" and row["num_speculative_tokens"] == max_k and row["rule"] in _RULES:
            label = "greedy" if row["rule"] == "greedy" else f"temperature {row['temperature']:g}, {row['rule']}"
            rates = [
                "" if rate is None else f"{rate:.3f} ({low:.2f}-{high:.2f})"
                for rate, (low, high) in zip(row["acceptance"], row["interval_95"], strict=True)
            ]
            length = row["mean_acceptance_length"]["value"]
            yield f"| {' | '.join([label, *rates, '' if length is None else f'{length:.2f}'])} |"


def _commands(inventory: Inventory, repo: str, base: str) -> Iterator[tuple[str, Sequence[str]]]:
    """The commands of each engine that runs it, as `nextn serve --print` and `nextn export` print them."""
    if inventory.layers:
        yield "nextn", [shlex.join(["nextn", "serve", repo])]
        published = replace(inventory.checkpoint, path=repo)
        for engine in ENGINES:
            try:
                found = engine_commands(published, engine)
            except ConfigError:
                continue  # it does not run this head
            yield NAMES[engine], [shlex.join(command) for command in found.commands]
        return
    yield "nextn", [shlex.join(["nextn", "serve", base, "--head", repo])]
    for engine in ("vllm", "sglang") if inventory.family.layer_model else ():
        yield named(engine), [shlex.join(draft_command(engine, base, repo))]
