"""quantization, quantformats, storage: what a config says, how tensors lie, and the config that leaves a head out."""

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick import loop

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.quant_formats import FORMATS
from nextn.checkpoint.quantization import QuantConfig, Storage, split_name, storage, stored_modules
from nextn.checkpoint.safetensors_file import RawTensor, TensorInfo, write_json, write_safetensors
from nextn.errors import CheckpointError

TRUNK = [f"model.layers.{i}.{name}" for i in (0, 6, 61) for name in ("self_attn.q_proj", "mlp.experts.0.up_proj")]
DENSE = ["mtp.fc", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.down_proj"]
DEEP = [f"model.layers.62.{name}" for name in ("eh_proj", "self_attn.q_proj", "mlp.experts.0.gate_proj")]
STACK = ["mtp.fc", "mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj"]
HEADS = {"dense": DENSE, "deep": DEEP, "stack": STACK, "part": ["mtp.fc"]}

# A section of each format as its tool writes it, for a trunk that is quantized but for lm_head.
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}
SECTIONS: dict[str, dict[str, object]] = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["lm_head"]},
    "regex": {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["lm_head", "re:.*mlp.gate$"]},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "ignored_layers": {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
    "awq": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["lm_head"]},
    "awq, empty": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": None},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "gptq, dynamic": {"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\..*": {"bits": 8}}},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 16}}},
    "auto-round, regex": {"quant_method": "auto-round", "bits": 4, "extra_config": {r".*q_proj": {"bits": 8}}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "nested": {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    "mixed": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {name: {"quant_algo": "FP8"} for name in [*TRUNK, *DENSE, *DEEP, *STACK]},
    },
    "quark": {"quant_method": "quark", "export": {}, "exclude": ["*lm_head"]},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
    "mlx": {"group_size": 64, "bits": 4},
}  # fmt: skip


def opened(folder, config, *, hf_quant=None, packed=TRUNK, plain=("lm_head", "model.layers.0.mlp.gate")):
    """A checkpoint with fp8 modules `packed` and bf16 modules `plain`."""
    tensors = {f"{name}.weight": RawTensor("F8_E4M3", [2, 2], bytes(4)) for name in packed}
    tensors |= {f"{name}.weight_scale": RawTensor("F32", [], bytes(4)) for name in packed}
    tensors |= {f"{name}.weight": RawTensor("BF16", [2, 2], bytes(8)) for name in plain}
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", config)
    if hf_quant is not None:
        write_json(folder / "hf_quant_config.json", hf_quant)
    return Checkpoint.open(folder)


@pytest.fixture
def quantization(tmp_path):
    def make(section, **options):
        found = QuantConfig.of(opened(tmp_path, {"quantization_config": section}, **options))
        assert found is not None
        return found

    return make


COVERED = {
    # compressed-tensors: a name is whole, an expression starts at the start; other groups and caches do not count
    "ct": ({**SECTIONS["compressed-tensors"], "ignore": ["mtp.fc", r"re:.*\.mlp\.gate$", "re:layers"]},
           {"mtp.fc": False, "mtp.fc2": True, "a.mlp.gate": False, "a.mlp.gate_proj": True, "model.layers.0.a": True}),
    "ct targets": ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": [r"re:model\..*"]}},
                   {"model.a": True, "mtp.fc": False}),
    "ct cache": ({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}},
                 {"mtp.fc": False}),
    # fp8: vLLM and SGLang want whole names, transformers takes the beginning or end of one
    "fp8": ({"quant_method": "fp8", "ignored_layers": ["mtp.fc", "model.layers.6"]},
            {"mtp.fc": False, "mtp.layers.0.q": True, "model.layers.6.q": None, "model.layers.61.q": True}),
    "fp8 none": ({"quant_method": "fp8"}, {"model.layers.61.eh_proj": True, "model.layers.61.shared_head.head": None}),
    "awq": ({"quant_method": "awq", "modules_to_not_convert": ["mtp"]}, {"mtp.fc": False, "x.mtp_layers": False}),
    "gptq": ({"quant_method": "gptq", "dynamic": {r"+:mtp\.fc": {}, r"-:.*mtp": {}}},
             {"mtp.fc": True, "mtp.layers.0.q": False, "model.layers.0.q": True}),
    "gptq blocks": ({"quant_method": "gptq", "modules_in_block_to_quantize": [["q_proj"], ["o_proj"]]},
                    {"mtp.layers.0.q_proj": True, "mtp.fc": False}),
    "auto-round": ({"quant_method": "auto-round", "block_name_to_quantize": "model.layers,vision",
                    "extra_config": {"mtp.fc": {"bits": 8}, "model.layers.0.a": {"bits": 16}, "mtp.b": {},
                                     r"router\..*": {"bits": 16}, ".*z": {}}},
                   {"mtp.fc": True, "mtp.b": False, "mtp.layers.0.q": False, "model.layers.0.a": False,
                    "model.layers.0.b": True, "model.layers.1.router.w": False,
                    "mtp.z": False, "model.layers.0.z": True}),
    # ModelOpt: globs in both; vLLM alone takes part of a name, SGLang alone one dotted part
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["mtp*", "l?yers.61.*", "layers.61.e"]},
                 {"mtp.fc": False, "model.mtp_layers.x": None, "model.layers.61.eh": None, "model.layers.6.x": True}),
    "modelopt cache": ({"quant_method": "modelopt", "quant_algo": None}, {"mtp.fc": False}),
    "mixed": ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"mtp.experts": {}}},
              {"mtp.experts.0.up": True, "mtp.fc": False}),
    "quark": ({"quant_method": "quark", "exclude": ["*mtp*", "re:model.layers.61"]},
              {"mtp.fc": None, "model.layers.61.q": False, "model.layers.6.q": True}),
    "bnb": ({"load_in_4bit": True, "llm_int8_skip_modules": ["fc", "model.layers.6", "proj"]},
            {"mtp.fc": False, "model.layers.6.q": False, "model.layers.61.q": True, "a.o_proj": None}),
    "torchao": ({"quant_method": "torchao", "modules_to_not_convert": ["mtp"]}, {"mtp.fc": False, "model.x": True}),
    "torchao by name": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig"}}}, {"a": None}),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["a.experts"]},
              {"mtp.fc": False, "mtp.experts.up": True, "a.experts.up": None}),
    "mlx": ({"group_size": 64, "mtp.fc": False}, {"mtp.fc": False, "mtp.x": None}),
    "quanto": ({"quant_method": "quanto", "modules_to_not_convert": ["mtp"]}, {"mtp.fc": False, "a.b": True}),
    "unknown": ({"quant_method": "exl3"}, {"mtp.fc": None}),
}  # fmt: skip


@loop("case", COVERED)
def test_covers(case, quantization):
    """Catches a list read by another format's rules: whole name, beginning, part, glob, expression, order."""
    section, expected = COVERED[case]
    found = quantization(section)
    assert {module: found.covers(module) for module in expected} == expected
    assert found.known == (case != "unknown")


def test_where_the_config_lies(tmp_path):
    """Catches a section that is overlooked, and two that disagree taken for one."""
    section = SECTIONS["fp8"]
    assert QuantConfig.of(opened(tmp_path, {"model_type": "x", "quantization_config": None})) is None
    for config in (
        {"text_config": {"quantization_config": section}},
        {"compression_config": {"config_groups": GROUPS}},
    ):
        found = QuantConfig.of(opened(tmp_path, config))
        assert found is not None
        assert found.covers("mtp.fc")
    own = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["mtp*"]}}
    alone = QuantConfig.of(opened(tmp_path, {}, hf_quant=own))
    assert alone is not None
    assert (alone.method, alone.covers("mtp.fc"), alone.covers("model.a")) == ("modelopt", False, True)
    both = QuantConfig.of(opened(tmp_path, {"quantization_config": SECTIONS["modelopt"]}, hf_quant=own))
    assert both is not None
    assert (both.covers("mtp.fc"), both.covers("model.a")) == (None, True)


@pytest.mark.one_case
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", SECTIONS)
def test_leaving_out(name, head, tmp_path):
    """Catches an edit that engines would not obey, that takes a trunk module with it, or that changes anything else."""
    config = {"model_type": "x", "quantization_config": {**SECTIONS[name], "extra": [1, {"a": None}]}, "last": 1}
    before = json.dumps(config)
    found = QuantConfig.of(opened(tmp_path, config))
    assert found is not None
    answers = {module: found.covers(module) for module in TRUNK}
    edited = found.leaving_out(HEADS[head])["config.json"]
    assert json.dumps(config) == before
    assert {**edited, "quantization_config": 0} == {**config, "quantization_config": 0}
    assert edited["quantization_config"]["extra"] == [1, {"a": None}]
    again = QuantConfig.of(opened(tmp_path, edited))
    assert again is not None
    assert [again.covers(module) for module in HEADS[head]] == [False] * len(HEADS[head])
    assert {module: again.covers(module) for module in TRUNK} == answers
    assert again.leaving_out(HEADS[head]) == {}


def new_entries(found, modules):
    section = found.leaving_out(modules)["config.json"]["quantization_config"]
    keys = ("ignore", "modules_to_not_convert", "ignored_layers", "dynamic", "extra_config", "exclude")
    return next(list(section[key]) for key in keys if section.get(key))


@loop(
    ("name", "modules", "expected"),
    [
        ("compressed-tensors", DENSE, ["lm_head", *DENSE]),
        # vLLM asks compressed-tensors for the first expert's three matrices, also where one tensor holds all
        ("compressed-tensors", STACK[1:2], ["lm_head", STACK[1], "mtp.layers.0.mlp.experts",
                                            *(f"mtp.layers.0.mlp.experts.0.{n}_proj" for n in ("gate", "up", "down"))]),
        ("quark", DEEP[2:], ["*lm_head", DEEP[2], "model.layers.62.mlp.experts"]),
        ("modelopt", DENSE, ["lm_head", "mtp.*"]),
        ("modelopt", DEEP, ["lm_head", "model.layers.62.*"]),
        ("awq", DEEP, ["lm_head", "model.layers.62."]),
        ("awq, empty", DENSE, ["mtp.", "lm_head", "model.layers.0.mlp.gate"]),
        ("gptq, dynamic", DEEP, [r"-:model\.layers\.62\..*", r"+:.*\..*"]),
        ("ignored_layers", ["mtp.fc"], ["lm_head", "mtp.fc"]),
    ],
)  # fmt: skip
def test_form_of_entries(name, modules, expected, quantization):
    """Catches an entry in a form that the format's engines do not match, and a rule of GPTQ that comes too late."""
    assert new_entries(quantization(SECTIONS[name]), modules) == expected


def test_layer_number_that_begins_another(quantization):
    """Catches layers.6 written so that it takes layers.61 with it."""
    for name in ("awq", "modelopt", "gptq", "bitsandbytes"):
        kept = ["model.layers.61.self_attn.q_proj"]
        found = quantization(SECTIONS[name], packed=kept)
        section = found.leaving_out(["model.layers.6.eh_proj"])["config.json"]["quantization_config"]
        assert FORMATS[name](section).covers(kept[0]) is True


def test_edit_that_would_take_another_module_with_it(quantization):
    """Catches an edit that is not read back: AWQ cannot name mtp.fc without mtp.fc2, as it takes parts of names."""
    with pytest.raises(CheckpointError, match=r"cannot leave mtp.fc unquantized: .*'mtp.fc2'"):
        quantization(SECTIONS["awq"], packed=["mtp.fc2"]).leaving_out(["mtp.fc"])


def test_both_files_are_edited(tmp_path):
    """Catches a copy of the exclusions that still says otherwise."""
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    found = QuantConfig.of(opened(tmp_path, {"quantization_config": SECTIONS["modelopt"]}, hf_quant=own))
    assert found is not None
    edited = found.leaving_out(DENSE)
    assert edited["config.json"]["quantization_config"] == {**SECTIONS["modelopt"], "ignore": ["lm_head", "mtp.*"]}
    wanted = {**own["quantization"], "exclude_modules": ["lm_head", "mtp.*"]}
    assert edited["hf_quant_config.json"] == {**own, "quantization": wanted}


def test_formats_without_a_list(quantization):
    """Catches an edit that no engine reads, and a head refused for a method whose loader may go by the tensors."""
    with pytest.raises(CheckpointError, match=r"cannot leave .* unquantized: .* list"):
        quantization({"quant_method": "mxfp4"}).leaving_out(["mtp.layers.0.mlp.experts.0.up_proj"])
    assert quantization({"quant_method": "exl3", "bits": 3}).leaving_out(["mtp.fc"]) == {}


BROKEN = [
    "fp8", [1], {"bits": 4}, {"quant_method": 8}, {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
    {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["re:("]},
    {"quant_method": "compressed-tensors", "config_groups": ["x"]},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 1, "targets": [2]}}},
    {"quant_method": "gptq", "dynamic": ["-:mtp"]}, {"quant_method": "gptq", "dynamic": {"-:" + "(" * 5000: {}}},
    {"quant_method": "auto-round", "extra_config": {".*": {"bits": "16"}}},
    {"quant_method": "modelopt", "quant_algo": 8}, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [1]},
    {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"] * 5000},
    {"quant_method": "awq", "modules_to_not_convert": ["x"] * 300_000},
]  # fmt: skip


@loop("section", BROKEN, ids=range(len(BROKEN)))
def test_broken_sections(section, tmp_path):
    """Catches a config without meaning that gets an answer, or a traceback."""
    with pytest.raises(CheckpointError, match=r"config\.json cannot be used: "):
        QuantConfig.of(opened(tmp_path, {"quantization_config": section}))


SLOW = [r"(x|xx)+$", r"(?:x|x?x)*y", "x*" * 20 + "y", r"(?R)?x", r"(x+)*\1+y"]


@loop("pattern", SLOW)
@loop(
    "section",
    [
        lambda pattern: {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": [f"re:{pattern}"]},
        lambda pattern: {"quant_method": "gptq", "dynamic": {f"-:{pattern}": {}}},
        lambda pattern: {"quant_method": "auto-round", "extra_config": {pattern: {"bits": 8}}},
        lambda pattern: {"quant_method": "fp8", "modules_to_not_convert": [pattern]},
    ],
)
def test_catastrophic_expressions(pattern, section, tmp_path):
    """Catches a stranger's expression that is let run: an answer or an error comes at once."""
    started = time.process_time()
    with pytest.raises(CheckpointError, match="takes longer than") if pattern == SLOW[0] else allowed():
        found = QuantConfig.of(opened(tmp_path, {"quantization_config": section(pattern)}))
        assert found is not None
        found.covers("x" * 250 + "!")
    assert time.process_time() - started < 1


class allowed:
    """A block that may raise CheckpointError."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return kind is not None and issubclass(kind, CheckpointError)


def test_globs_do_not_backtrack(quantization):
    """Catches a glob that is matched by trying every way to place its stars."""
    found = quantization({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*x" * 400 + "y", "*?" * 400]})
    started = time.process_time()
    assert found.covers("x" * 290) is True
    assert time.process_time() - started < 0.5


def test_deep_nesting(quantization):
    """Catches an edit that walks what it does not know; JSON documents nest at most 100 levels deep."""
    deep: object = []
    for _ in range(90):
        deep = [deep]
    found = quantization({**SECTIONS["fp8"], "deep": deep})
    assert found.leaving_out(["mtp.fc"])["config.json"]["quantization_config"]["modules_to_not_convert"][-1] == "mtp.fc"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("ab.*[](){}|\\+?^$re:-1", max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.*:-", max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers", "dynamic", "extra_config",
        "config_groups", "quantized_layers", "quant_algo", "quantization", "block_name_to_quantize", "quant_type",
        "modules_in_block_to_quantize", "llm_int8_skip_modules"]  # fmt: skip


@pytest.mark.more
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*FORMATS, "sinq"]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5), JSON)
def test_any_config(checkpoint, method, section, other):
    """Catches a traceback, a hang, and an answer that is none of the three."""
    config = {"quantization_config": {**section, "quant_method": method}, "text_config": other}
    checkpoint.config.clear()
    checkpoint.config.update(config)
    started = time.process_time()
    with allowed():
        found = QuantConfig.of(checkpoint)
        assert found is not None
        assert found.covers("a.b.experts.0.a") in (True, False, None)
        edited = found.leaving_out(["a.b", "b.a"]).get("config.json", config)
        checkpoint.config.update(edited)
        again = QuantConfig.of(checkpoint)
        assert again is not None
        covered = None if method == "gguf" else False  # its tensors decide
        assert [again.covers("a.b"), again.covers("b.a")] == [covered, covered]
    assert time.process_time() - started < 1


@pytest.fixture
def checkpoint(tmp_path):
    return opened(tmp_path, {})


def info(name, dtype, shape):
    return TensorInfo(name, dtype, shape, "f", 0, 0)


E4M3, E8M0 = "F8_E4M3", "F8_E8M0"
STORED: list[tuple[Storage | None, dict[str, tuple[str, tuple[int, ...]]]]] = [
    ("plain", {".weight": ("BF16", (256, 256))}),
    ("plain", {"": ("F32", (4, 256, 256))}),
    ("fp8-block", {".weight": (E4M3, (256, 256)), ".weight_scale_inv": ("F32", (2, 2))}),
    ("fp8-block", {".weight": (E4M3, (128, 128)), ".weight_scale_inv": ("F32", (1, 1))}),
    ("fp8-block", {".weight": (E4M3, (256, 256)), ".scale": (E8M0, (2, 2))}),
    ("fp8-block", {".weight": (E4M3, (256, 256)), ".weight_scale": ("BF16", (2, 2))}),
    ("fp8-block", {"": (E4M3, (4, 256, 256)), "_scale_inv": ("F32", (4, 2, 2))}),
    ("fp8-tensor", {".weight": (E4M3, (256, 256)), ".weight_scale": ("F32", ()), ".input_scale": ("F32", ())}),
    ("fp8-tensor", {".weight": (E4M3, (256, 256)), ".weight_scale": ("BF16", (256, 1))}),
    ("fp8-bare", {".weight": (E4M3, (256, 256)), ".bias": ("BF16", (256,))}),
    ("mxfp8", {".weight": (E4M3, (256, 256)), ".weight_scale": ("U8", (256, 8))}),
    ("nvfp4", {".weight": ("U8", (256, 128)), ".weight_scale": (E4M3, (256, 16)), ".weight_scale_2": ("F32", ())}),
    ("mxfp4", {".weight": ("U8", (256, 128)), ".weight_scale": ("U8", (256, 8))}),
    ("mxfp4", {".weight": ("I8", (256, 128)), ".scale": (E8M0, (256, 8))}),
    ("mxfp4", {"_blocks": ("U8", (4, 256, 8, 16)), "_scales": ("U8", (4, 256, 8))}),
    ("int8", {".weight": ("I8", (256, 256)), ".weight_scale": ("F32", (256, 1))}),
    ("compressed", {".weight_packed": ("I32", (256, 32)), ".weight_scale": ("BF16", (256, 2))}),
    ("gptq", {".qweight": ("I32", (32, 64)), ".scales": ("F16", (2, 64)), ".qzeros": ("I32", (2, 8))}),
    ("awq", {".qweight": ("I32", (256, 8)), ".scales": ("F16", (2, 64)), ".qzeros": ("I32", (2, 8))}),
    ("unknown", {".qweight": ("I32", (256, 8))}),
    ("bnb", {".weight": ("U8", (512, 1)), ".weight.absmax": ("U8", (16,)),
             ".weight.quant_state.bitsandbytes__nf4": ("U8", (90,))}),
    ("bnb", {".weight": ("I8", (256, 256)), ".SCB": ("F32", (256,)), ".weight_format": ("U8", ())}),
    ("mlx", {".weight": ("U32", (256, 32)), ".scales": ("BF16", (256, 4)), ".biases": ("BF16", (256, 4))}),
    ("gguf", {".weight_q4_k": ("U8", (256, 144))}),
    ("gguf", {".weight_mxfp4": ("U8", (256, 136)), ".bias": ("BF16", (256,))}),
    ("unknown", {".weight": ("I64", (8, 8))}),
    (None, {".bias": ("BF16", (8,))}),
]  # fmt: skip


@loop(("kind", "parts"), STORED, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(STORED)])
def test_storage(kind, parts):
    """Catches a format taken for another, fp8 without its scale above all, and a side tensor left with nobody."""
    name = "mtp.layers.0.mlp.experts.down_proj"
    tensors = {name + suffix: info(name + suffix, *what) for suffix, what in parts.items()}
    assert storage(tensors, name) == kind
    for suffix in parts.keys() - {".bias"}:
        assert split_name(name + suffix, tensors) == (name, suffix)
    assert dict(stored_modules(tensors)) == ({name: kind} if kind else {})


def test_names_that_only_look_like_side_tensors():
    """Catches hc_attn_scale of DeepSeek-V4 taken for the scale of a weight that is not there."""
    names = {"mtp.0.hc_attn_scale", "mtp.0.norm.weight"}
    assert split_name("mtp.0.hc_attn_scale", names) == ("mtp.0.hc_attn_scale", "")
    assert dict(stored_modules({"mtp.0.norm.weight": info("mtp.0.norm.weight", "BF16", (4,))})) == {}
