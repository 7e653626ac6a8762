"""load_trunk: names that transformers does not map by itself."""

import pytest
import torch
from stored import in_one_file, set_config
from tiny import build, decode, prompt
from transformers import AutoModelForCausalLM

import nextn
from nextn.errors import CheckpointError
from nextn.model.model import Model


@pytest.mark.more
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_wrapper_of_other_programs(name, tmp_path):
    """`language_model.model.`, as MLX and older transformers write it, loads."""
    build(name).save(tmp_path)

    def tokens():
        model = Model.load(tmp_path, dtype=torch.float32)
        return decode(model, [prompt(5)], num_speculative_tokens=2, max_tokens=8)[0]

    def wrap(table):
        for each in [each for each in table if not each.startswith("mtp.")]:
            table[f"language_model.{each}"] = table.pop(each)

    expected = tokens()
    in_one_file(tmp_path, wrap)
    assert tokens() == expected


@pytest.mark.more
@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("bailing_hybrid", marks=pytest.mark.slow)])
def test_a_wrapped_text_model_is_a_finding_where_transformers_misses_it(name, wrapper, tmp_path):
    build(name).save(tmp_path)

    def wrap(table):
        for each in [each for each in table if each.startswith("model.")]:
            table[each.replace("model.", wrapper, 1)] = table.pop(each)

    in_one_file(tmp_path, wrap)
    _, loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    rules = {each.rule for each in nextn.audit(tmp_path).findings}
    assert ("names-unknown" in rules) == bool(loaded["missing_keys"])
    assert bool(loaded["missing_keys"]) == ((name, wrapper) != ("qwen3_5", "model.language_model."))


def test_a_method_that_transformers_does_not_know(tmp_path):
    """It would read the codes as values, and say that shapes differ; no package helps."""
    build("glm4_moe").save(tmp_path)

    def pack(table):
        for name in [each for each in table if "layers.0" in each and each.endswith("_proj.weight")]:
            rows, columns = table[name].shape
            table[name] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
            table[f"{name}_scale"] = torch.ones(rows, columns // 16)

    in_one_file(tmp_path, pack)
    set_config(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": []})
    with pytest.raises(CheckpointError, match=r"is modelopt .* neither transformers nor nextn reads"):
        Model.load(tmp_path)
