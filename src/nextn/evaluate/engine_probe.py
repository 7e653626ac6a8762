"""Which weights an engine serves: log-probabilities of a greedy answer, compared with the trunk's or with earlier ones.

The name and the address of an engine stay the same when it is started again with other weights; its log-probabilities
do not. So what an engine answered is stored with them, and used again only if they are still the same.
Also what the family's row documents of an engine, as evidence about its faults.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nextn.checkpoint.safetensors_file import write_json
from nextn.engines.answers import EngineRequest, common_prefix
from nextn.engines.endpoint import Endpoint
from nextn.evaluate.given_texts import token_logprobs
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.family_table import EngineSupport, Family
from nextn.model.trunk import Trunk, TrunkOutput

_NUM_TOKENS = 32  # of the greedy answer
# Nats per token, mean. Of the checkpoint in the package, six greedy texts: 0.01 for the same weights in bf16, 0.003 for
# weights rounded to 8 bits, 0.02 for 6 bits, 0.03 to 0.11 for 4 bits.
_MAX_DIFFERENCE = 0.1  # between an engine and the trunk
_MAX_CHANGE = 0.02  # of one engine between two times: only the batch that a request runs in differs
_MIN_COMPARED = 8  # tokens before two texts may part at a near tie
_PROBE = "probe.json"
# Odds of a fault of conventions in an engine whose code for this family was read and does not have it: versions before
# and after, forks and patches still do.
DOCUMENTED_PRIOR = 0.05
# Fault -> the convention that an engine of the row states where it deviates; None: the row would say so in no field.
_CONVENTIONS: Mapping[str, str | None] = {
    "norm-offset-missing": None, "norm-offset-added": None, "inputs-swapped": None, "pairs-off-by-one": None,
    "wrong-keys": None, "window-lost": None, "window-everywhere": None, "query-shifted": "trunk_kv",
    "wrong-hidden": "hidden",
    "wrong-next-hidden": "next_hidden", "position0": "position0", "mtp-layers-permuted": "order",
}  # fmt: skip
# Causes with which the engine may have loaded something else than this head.
_LOADING = ("head-unset", "nothing-accepted", "weights", "one-mtp-layer", "mtp-layers-permuted", "own-lm-head-lost")


@dataclass(frozen=True)
class EngineProbe:
    """An engine's greedy answer to one prompt."""

    prompt: tuple[int, ...]
    text: str
    ids: tuple[int, ...] = ()  # () and () from an engine that reports no ids or no log-probabilities
    logprobs: tuple[float, ...] = ()

    @classmethod
    def ask(cls, endpoint: Endpoint, prompt: tuple[int, ...]) -> "EngineProbe":
        """Ask the engine. Raises EngineError if it fails."""
        answer = endpoint.answer(EngineRequest(prompt, _NUM_TOKENS, logprobs=1))
        logprobs = tuple(token.logprob for token in answer.tokens if token.logprob is not None)
        if not answer.ids or len(logprobs) != len(answer.ids):
            return cls(prompt, answer.text)
        return cls(prompt, answer.text, answer.ids, logprobs)

    @property
    def reference_text(self) -> ReferenceText:
        """The answer, for the trunk to run over."""
        return ReferenceText(self.prompt, self.ids)

    def is_same_as(self, other: "EngineProbe") -> bool:
        """Whether both can be answers of the same weights: equal texts, if there are no log-probabilities."""
        if self.prompt != other.prompt or not (self.logprobs and other.logprobs):
            return (self.prompt, self.text, self.ids) == (other.prompt, other.text, other.ids)
        # Where the texts part at a near tie, the two tokens have almost the same log-probability.
        common = common_prefix(self.ids, other.ids)
        is_complete = common == len(self.ids) == len(other.ids)
        compared = common if is_complete else common + 1
        if not is_complete and (compared < _MIN_COMPARED or compared > min(len(self.ids), len(other.ids))):
            return False
        pairs = list(zip(self.logprobs[:compared], other.logprobs[:compared], strict=True))
        return abs(pairs[-1][0] - pairs[-1][1]) <= 4 * _MAX_CHANGE and _mean_difference(pairs) <= _MAX_CHANGE


def _mean_difference(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(abs(one - other) for one, other in pairs) / len(pairs)


class EngineFolder:
    """A folder of an engine's answers, for the same command after an interruption.

    `probe` is the one that its answers were stored with, or a new one; `was_cleared`: answers of other weights were
    removed.
    """

    def __init__(self, path: Path, asked: EngineProbe) -> None:
        """Open the folder, which is created; `asked` is the engine's present answer."""
        stored = _read_probe(path / _PROBE)
        is_same = stored is not None and asked.is_same_as(stored)
        self.path, self.was_cleared = path, stored is not None and not is_same
        self.probe = stored if stored is not None and is_same else asked
        if path.exists() and not is_same:
            self.remove()
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / _PROBE, asdict(self.probe))

    def remove(self) -> None:
        shutil.rmtree(self.path)


def _read_probe(path: Path) -> EngineProbe | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        prompt, ids, logprobs = (tuple(record[name]) for name in ("prompt", "ids", "logprobs"))
        return EngineProbe(prompt, record["text"], ids, logprobs)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # what was stored cannot be trusted


@dataclass(frozen=True)
class EngineCheck:
    """The comparison of an engine's log-probabilities with the trunk's."""

    engine: str
    num_tokens: int
    mean_difference: float  # nats, of absolute values
    max_difference: float

    @property
    def is_same(self) -> bool:
        """Whether the engine can serve this trunk."""
        return self.mean_difference <= _MAX_DIFFERENCE

    @property
    def warnings(self) -> list[str]:
        """What the user must know."""
        if self.is_same:
            return []
        return [
            f"{self.engine} serves another model than this checkpoint, or coarsely rounded weights: its "
            f"log-probabilities differ by {self.mean_difference:.2f} nats per token ({self.num_tokens} tokens of one "
            f"prompt; at most {_MAX_DIFFERENCE:g} is expected): the figures are of its text, not of this model's"
        ]

    def as_record(self) -> dict[str, object]:
        return vars(self) | {"is_same": self.is_same}


@torch.inference_mode()
def check_engine(engine: str, probe: EngineProbe, trunk: Trunk, output: TrunkOutput) -> EngineCheck:
    """Compare the probe's log-probabilities with those of the trunk's states `output` of the same text."""
    blocks = token_logprobs(trunk, probe.reference_text, output)
    pairs = list(zip((value for block in blocks for value in block[0].tolist()), probe.logprobs, strict=True))
    return EngineCheck(engine, len(pairs), _mean_difference(pairs), max(abs(one - other) for one, other in pairs))


def engine_priors(family: Family, engine: str) -> dict[str, float]:
    """Return fault -> prior odds, of the faults that the engine's code for this family does not have."""
    row = _row(family, engine)
    if row is None:
        return {}
    return {
        fault: DOCUMENTED_PRIOR for fault, field in _CONVENTIONS.items() if not field or getattr(row, field) is None
    }


def documented_faults(family: Family, engine: str) -> tuple[str, ...]:
    """Return the faults that the engine's code for this family has: its conventions that are not the family's."""
    row = _row(family, engine)
    return () if row is None else tuple(
        fault for fault, field in _CONVENTIONS.items()
        if field and getattr(row, field) not in (None, getattr(family, field))
    )  # fmt: skip


def _row(family: Family, engine: str) -> EngineSupport | None:
    row = family.engines.get(engine.lower().replace(".", ""))
    return row if row is not None and row.support == "runs" else None


def next_checks(named: Sequence[str], *, driven: bool, temperature: float) -> list[str]:
    """Return what to check of an engine with a finding, the cheapest first."""
    checks = [
        "the engine serves this folder: compare `sha256sum *.safetensors config.json` where it runs with this one"
    ]
    if not named or any(name in _LOADING for name in named):
        checks.append("the loader's warnings in the engine's log: tensors skipped, missing or newly initialized")
    if not driven:
        checks.append(
            f"the engine's temperature and rule: the comparison assumes temperature {temperature:g} (--temperatures, "
            "--rule)"
        )
        checks.append("the same prompts in both, with the engine running: --engine HOST:PORT --drive")
    return checks
