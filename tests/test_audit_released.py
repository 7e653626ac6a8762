"""Quantization configs of released models with heads are no fault, and heads that contradict them are.

released_quantization.json has, for each model, the section of its config.json or hf_quant_config.json as published,
with the entries of two trunk layers (0 and 3, here 0 and 1) and of the head (`head_layer`, here layer 2) only. Source:
the configs that github.com/ai-dynamo/aiconfigurator keeps beside its support matrix, read 2026-11-27.
"""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from artifacts import publish
from quick import loop

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.safetensors_file import RawTensor

RELEASED = json.loads(Path(__file__).with_name("released_quantization.json").read_text())
PLAIN = re.compile(r"norm|mlp\.gate$|shared_expert_gate|conv1d|router|eh_proj")  # not quantized, whatever is listed
RULES = {"quantization", "quantization-unused", "scale-missing", "precision-lower"}


def left_out(section, module):
    """By the list's own words: names and their parts, `*` for any text."""
    given = [each for key in ("ignore", "modules_to_not_convert", "exclude_modules") for each in section.get(key, ())]
    return any(fnmatchcase(module, each) or module.startswith(f"{each}.") for each in given)


def algorithm(section, module):
    """What the section has the module stored in; "" for unquantized."""
    if left_out(section, module):
        return ""
    if "quantized_layers" in section:
        chosen = [each for name, each in section["quantized_layers"].items() if f"{module}.".startswith(f"{name}.")]
        return chosen[0]["quant_algo"] if chosen else ""
    return section.get("quant_algo") or "FP8 in blocks"


def stored(name, shape, algorithm):
    """The tensors of one matrix, by name; any values."""
    *lead, rows, columns = shape

    def made(suffix, dtype, shape):
        size = int(np.prod(shape)) * (4 if dtype == "F32" else 1)
        return {f"{name}{suffix}": RawTensor(dtype, tuple(shape), b"\x3c" * size)}

    if algorithm.endswith("NVFP4"):
        packed = made("", "U8", [*lead, rows, columns // 2])
        return packed | made("_scale", "F8_E4M3", [*lead, rows, columns // 16]) | made("_scale_2", "F32", [])
    scale = made("_scale", "F32", []) if algorithm == "FP8" else made("_scale_inv", "F32", [*lead, 1, 1])
    return made("", "F8_E4M3", shape) | scale


def quantized(section, *, contradicted):
    """A change of a published checkpoint's tensors: linear layers as the section says, or the head's the other way."""

    def change(table):
        for name in [each for each in table if re.search(r"layers?\.\d", each) and each.endswith(".weight")]:
            module, shape = name.removesuffix(".weight"), table[name].shape
            if len(shape) != 2 or PLAIN.search(module):
                continue
            chosen = algorithm(section, module)
            if contradicted and re.search(r"mtp\.|layers\.2\.", name):
                other = section.get("quant_algo", "").replace("MIXED_PRECISION", "NVFP4") or "FP8 in blocks"
                chosen = "" if chosen else other
            if chosen:
                del table[name]
                table |= stored(name, shape, chosen)

    return change


def findings(model, folder, *, contradicted):
    about = RELEASED[model]
    section, inside = about["section"], about["file"] == "config.json"
    change = quantized(section, contradicted=contradicted)
    config = {"quantization_config": section} if inside else {}
    publish(folder, about["family"], config=config, change=change, **about.get("options", {}))
    if not inside:
        (folder / about["file"]).write_text(json.dumps({"quantization": section}))
    return {each.rule for each in audit(Checkpoint.open(folder)).findings} & RULES


@pytest.mark.more
@loop("model", RELEASED)
def test_a_released_config_is_no_fault(model, tmp_path):
    assert findings(model, tmp_path / model, contradicted=False) == set()


@loop("model", RELEASED)
def test_a_head_that_contradicts_it_is_one(model, tmp_path):
    """Packed although the list leaves it out, or plain although the list does not: engines misread it."""
    assert "quantization" in findings(model, tmp_path / model, contradicted=True)
