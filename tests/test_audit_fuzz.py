"""audit against strangers: 10,000 mutated headers, indices and configs, each a report or one of our errors."""

import json
import random
import time
import tracemalloc
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import pytest
from artifacts import publish
from quick import others_slow

from nextn.audit_rules import AuditReport, audit
from nextn.checkpoint import remote
from nextn.checkpoint.checkpoint import INDEX, _assemble
from nextn.errors import NextnError

CASES = 10_000
BATCHES = 20
FAMILIES = ("deepseek_v3", "qwen3_5", "step3p5", "deepseek_v4", "exaone4_5")
SLOWEST = 2.0  # seconds of one case's processor time, where the median has about three milliseconds
PEAK = 64 * 1024 * 1024

NAMES = (
    "model.layers.2.enorm.weight", "model.layers.99999999999999999999.enorm.weight", "mtp.fc.weight", "mtp..weight", "",
    "mtp.layers." + "9" * 5000 + ".x", "nextn." * 300, "model.layers.٣.eh_proj.weight", "mtp\n.fc", "mtp.\ud800", ".",
    "model.layers.-1.enorm", "model.layers.2", "lm_head.weight", "mtp.0.head.weight", "a" * 100_000, "mtp.\x1b[2J",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 3, 61, 2**31, 2**63, 2**64, 10**300, -(10**30), 1.5, 1e308, float("nan"), True)
KEYS = (
    "model_type", "num_hidden_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers", "hidden_size", "vocab_size",
    "text_config", "quantization_config", "layer_types", "tie_word_embeddings", "num_mtp_layers", "mtp_config", "dtype",
    "initializer_range", "compression_config",
)  # fmt: skip
QUANT = (
    "fp8", "compressed-tensors", "gptq", "awq", "modelopt", "auto-round", "bitsandbytes", "quark", "mxfp4", "nonsense",
)  # fmt: skip
FIELDS = ("ignore", "modules_to_not_convert", "exclude_modules", "config_groups", "dynamic", "targets", "weights", "x")


@dataclass(frozen=True)
class Bytes:
    """A file in memory."""

    content: bytes
    name: str

    def __str__(self) -> str:
        return self.name

    def start(self, length: int) -> tuple[bytes, int]:
        return self.content[:length], len(self.content)

    def read(self, begin: int, end: int) -> bytes:
        return self.content[begin:end]


class Serial(Executor):
    """Runs at once: threads, that most of the time would go to, are other tests' matter."""

    def __init__(self, _: int) -> None:
        pass

    def map(self, function, *args):
        return map(function, *args)


@pytest.fixture(autouse=True)
def serial(monkeypatch):
    monkeypatch.setattr(remote, "ThreadPoolExecutor", Serial)


def junk(rng: random.Random, depth: int = 2) -> object:
    """A JSON value of any kind, sometimes thousands deep."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice((*NAMES, *QUANT, "(a+)+$", "re:(a|a)*b", "*" * 50, "-:.*", "linear_attention"))
    if kind in (2, 3) and depth:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind in (4, 5) and depth:
        return {rng.choice((*KEYS, *FIELDS, *NAMES)): junk(rng, depth - 1) for _ in range(rng.randrange(4))}
    if kind == 6 and rng.random() < 0.1:
        return nested(rng.choice((50, 900, 3000)))
    return rng.choice((None, False, "", [], {}, rng.randrange(10)))


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def dumps(value: object) -> bytes:
    """JSON of any depth: json.dumps gives up at the interpreter's."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b'{"text_config": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def flip(rng: random.Random, data: bytes, first: int) -> bytes:
    """A few wrong bytes among the first ones."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        out[rng.randrange(min(len(out), first))] = rng.choice((rng.randrange(256), *b'{}[]",:0123456789'))
    return bytes(out)


def edit_header(rng: random.Random, data: bytes) -> bytes:
    """Another table of tensors before the same bytes; mostly one that still fits them."""
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    name = rng.choice([each for each in table if each != "__metadata__"])
    entry = table.pop(name)
    match rng.randrange(6):
        case 0 | 1:
            table[rng.choice(NAMES)] = entry
        case 2:
            table[name] = entry | {rng.choice(("dtype", "shape", "data_offsets")): junk(rng)}
        case 3:
            count = 1
            for side in entry["shape"]:
                count *= side
            table[name] = entry | {
                "shape": rng.choice(([count], [1, count], [count, 1], [1] * 40 + [count], [2, count // 2]))
            }
        case 4:
            other = rng.choice([("F16", 2), ("I16", 2), ("U8", 1), ("F8_E4M3", 1), ("F4", 0.5)])
            table[name] = entry | {
                "dtype": other[0],
                "shape": [int((entry["data_offsets"][1] - entry["data_offsets"][0]) / other[1])],
            }
        case _:
            table[name] = junk(rng)
    header = dumps(table)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def absurd(rng: random.Random, data: bytes) -> bytes:
    """Another length before the header."""
    length = rng.choice((0, 1, 7, len(data), 10**8, 10**8 + 1, 2**63, 2**64 - 1, rng.randrange(2**20)))
    return length.to_bytes(8, "little") + data[8:]


def edit_config(rng: random.Random, data: bytes) -> bytes:
    config = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = config
        if rng.random() < 0.1 and isinstance(config.get("text_config"), dict):
            place = config["text_config"]
        key = rng.choice((*KEYS, *config))
        place[key] = junk(rng)
        if rng.random() < 0.3:
            place["quantization_config"] = {"quant_method": rng.choice(QUANT), rng.choice(FIELDS): junk(rng, 4)}
        if rng.random() < 0.1:
            place.pop(key)
    return dumps(config)


def edit_json(rng: random.Random, data: bytes) -> bytes:
    """Of an index or a tokenizer."""
    value = json.loads(data)
    inner = rng.choice([each for each in value.values() if isinstance(each, dict)])
    for _ in range(rng.choice((1, 5))):
        inner[rng.choice((*NAMES, *list(inner)[:5]))] = junk(rng)
    return dumps(value)


def mutated(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with one or two of them damaged."""
    out = dict(files)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(out))
        data = out[name]
        if len(data) < 16:
            continue
        way = rng.randrange(5)
        if way == 0:
            out[name] = flip(rng, data, 3000)
        elif way == 1:
            out[name] = data[: rng.randrange(len(data))]
        elif not name.endswith(".safetensors"):
            edit = edit_config if name == "config.json" else edit_json
            out[name] = edit(rng, files[name])
        else:
            out[name] = (absurd if way == 2 else edit_header)(rng, files[name])
    return out


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> list[dict[str, bytes]]:
    """Two shards with an index, and a tokenizer, of each family."""
    found = []
    for name in FAMILIES:
        folder = publish(tmp_path_factory.mktemp(name), name, shards=2)
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1, "b": 2}}, "added_tokens": [{"id": 3}]}')
        found.append({file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())})
        assert INDEX in found[-1]
    return found


def checked(files: dict[str, bytes]) -> AuditReport | NextnError:
    try:
        return audit(_assemble("stranger", {name: Bytes(data, name) for name, data in files.items()}))
    except NextnError as error:
        return error


@pytest.mark.more
@pytest.mark.parametrize("batch", others_slow(range(BATCHES), 0))
def test_unrecognized_tensors(batch, originals):
    """A traceback, a hang, or memory that a few kilobytes of input ask for; the case's number is its seed."""
    outcomes = {"clean": 0, "findings": 0, "error": 0}
    for number in range(batch, CASES, BATCHES):
        rng = random.Random(number)
        files = mutated(rng, rng.choice(originals))
        started = time.process_time()
        try:
            report = checked(files)
        except BaseException as error:
            raise AssertionError(f"case {number}") from error
        assert time.process_time() - started < SLOWEST, f"case {number}"
        if isinstance(report, AuditReport):
            outcomes["clean" if report.clean else "findings"] += 1
            json.dumps(report.to_dict())
        else:
            outcomes["error"] += 1
            assert len(str(report)) < 2000, f"case {number}"
    assert min(outcomes.values()) > CASES // BATCHES // 50, outcomes  # each way out is taken


@pytest.mark.more
def test_memory(originals):
    """The same for memory, on fewer cases, as counting it slows them."""
    tracemalloc.start()
    for number in range(CASES, CASES + 60):
        rng = random.Random(number)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        checked(mutated(rng, rng.choice(originals)))
        assert tracemalloc.get_traced_memory()[1] - before < PEAK, f"case {number}"
    tracemalloc.stop()
