"""The synthetic layouts are the real ones: transformers reads their configs and trunks, our own models have their names."""

import re

import pytest
import torch
from artifacts import LAYOUTS, bf16, e4m3, load_json, publish, tensors
from parts import LAYERS
from tiny import CONFIGS, build
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from nextn.checkpoint import Checkpoint
from nextn.errors import NextnError
from nextn.families import by_config, by_name, rows
from nextn.inventory import Inventory

KNOWN = [name for name in LAYOUTS if LAYOUTS[name].config["model_type"] in CONFIG_MAPPING]


def test_loads():
    pass


@pytest.mark.parametrize("name", KNOWN)
def test_trunk(name, tmp_path):
    folder = publish(tmp_path, name, dtype="F32")
    config = AutoConfig.from_pretrained(folder)
    kind = type(config)
    auto = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, low_cpu_mem_usage=False)
    family = by_name(name)
    print(type(model).__name__, {k: v for k, v in info.items() if v})
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert not [x for x in info["unexpected_keys"] if family.canonical(x, LAYERS) is None], info["unexpected_keys"]
