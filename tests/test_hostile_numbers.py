"""Numbers in files that no model has are refused where the file is read, before they become loops, sets or shapes."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import pytest
from quick import loop
from tiny import FIXTURES

from nextn.bounded_json import check_numbers
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.cli.train_common import merge_settings
from nextn.conformance.record import Canary
from nextn.data.chat_template import check_growth, tokenizer_failures
from nextn.errors import CheckpointError, ConfigError
from nextn.model.device_map import _read_map
from nextn.model.text_interface import _eos_of
from nextn.serve.publish import _read as read_figures
from nextn.train.answers_file import resume_answers
from nextn.train.joint_run import _read_config

HOSTILE = {
    "n_routed_experts": 2**31,
    "num_experts_per_tok": 10**6,
    "num_hidden_layers": 10**6,
    "num_nextn_predict_layers": 10**9,
    "mtp_num_hidden_layers": -(10**6),
    "hidden_size": 2**40,
    "vocab_size": 10**12,
    "num_key_value_heads": 2**31,
    "anything": 10**400,
    "n_group": 2**20,
}


@loop("name", HOSTILE)
def test_numbers_of_a_config(name, tmp_path):
    """At every level of config.json; in no time, with the name, the value and what is valid."""
    config = json.loads((FIXTURES / "glm" / "config.json").read_text())
    for nested in (False, True):
        folder = tmp_path / str(nested)
        shutil.copytree(FIXTURES / "glm", folder)
        number = {name: HOSTILE[name]}
        changed = config | ({"text_config": number, "layers": [[number]]} if nested else number)
        (folder / "config.json").write_text(json.dumps(changed))
        begin = time.monotonic()
        with pytest.raises(CheckpointError, match=rf"{name} = .*; expected") as error:
            Checkpoint.open(folder)
        assert time.monotonic() - begin < 5
        assert len(str(error.value)) < 1000


def test_numbers_of_published_models_are_accepted():
    """The largest of any: contexts of ten million, vocabularies, and flags that are no integers."""
    check_numbers({
        "num_hidden_layers": 128, "n_routed_experts": 4096, "num_experts_per_tok": 64, "vocab_size": 1_048_576,
        "max_position_embeddings": 10_485_760, "rope_theta": 10_000_000_000, "hidden_size": 32_768,
        "num_experts": None, "use_experts": True, "initializer_range": 0.02, "time_step_limit": [0.0, float("inf")],
        "layer_types": ["full_attention"] * 128, "quantization_config": {"group_size": -1, "bits": 4},
    })  # fmt: skip


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("step", "growth"),
    [
        (replace({"String": "a"}, "a" * 50), 50**4), (replace({"Regex": ""}, "a"), 2**4),
        (replace({"Regex": "a"}, "aa"), 16),
        (replace({"Regex": "(?<n>"}, "aaaa" * 5), 21**4), ({"type": "Prepend", "prepend": "a" * 99}, 99**4),
        (replace({"String": "   "}, "a"), 1), (replace({"Regex": " {2,}"}, " "), 1), ({"type": "NFKC"}, 1),
    ],
)  # fmt: skip
def test_what_a_tokenizer_makes_of_a_text(step, growth):
    """The steps of a sequence multiply."""
    for field, steps in (("normalizer", "normalizers"), ("decoder", "decoders")):
        document = {field: {"type": "Sequence", steps: [step] * 4}}
        if growth <= 1000:
            check_growth(document)
        else:
            with pytest.raises(ValueError, match=re.escape(f"its {field} can make a text {growth:.3g} times as long")):
                check_growth(document)


@pytest.mark.parametrize("eos", ["257", [257, "a"], 257.0, {"a": 1}, True, 2**70, -5])
def test_ends_of_text_are_token_ids(eos):
    """Which transformers takes as they are, and which then never end a text, or stop the program."""
    with pytest.raises(ConfigError, match=r"eos_token_id of SimpleNamespace: token id = .*; expected a whole number"):
        _eos_of(SimpleNamespace(eos_token_id=None), SimpleNamespace(eos_token_id=eos), None)
    assert _eos_of(SimpleNamespace(eos_token_id=[257, -1]), None, None) == (257,)


def test_a_panic_of_the_tokenizer_is_an_error():
    """Which is no Exception, so that nothing else catches it."""
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(ConfigError, match="the tokenizer failed on this text: backtracked"), tokenizer_failures():
        raise panic("backtracked\nmore")
    with pytest.raises(KeyboardInterrupt), tokenizer_failures():
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda path: merge_settings(path, []), id="settings"),
        pytest.param(_read_config, id="config"),
        pytest.param(read_figures, id="figures"),
        pytest.param(lambda path: _read_map(str(path), None), id="device map"),
        pytest.param(Canary.read, id="canary"),
    ],
)
def test_json_that_is_nested_too_deep(read, tmp_path):
    """Python's parser raises RecursionError, which is no ValueError."""
    path = tmp_path / "deep.json"
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ConfigError, match="nested more than"):
        read(path)
    path.write_text("1," * 40_000_000)
    with pytest.raises(ConfigError, match="are read"):
        read(path)


def test_a_setting_that_is_nested_too_deep_is_text():
    assert merge_settings(None, ["lam=" + "[" * 100_000]) == {"lam": "[" * 100_000}


def test_an_answer_that_is_nested_too_deep(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(CheckpointError, match=":1: not JSON"):
        resume_answers(path, {}, [], 1)
