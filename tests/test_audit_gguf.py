"""GGUF files: what llama.cpp would meet, and files that lie about themselves."""

import builtins
import zlib

import gguf
import numpy as np
import pytest
from quick import loop

from nextn.audit_rules.gguf import audit_gguf
from nextn.errors import CheckpointError, ConfigError

H, V, LAYERS = 32, 64, 2
Kind = gguf.GGMLQuantizationType
BLOCK = {
    "attn_norm.weight": (H,), "attn_q.weight": (H, H), "attn_k.weight": (H, H), "attn_v.weight": (H, H),
    "attn_output.weight": (H, H), "attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,),
    "post_attention_norm.weight": (H,), "ffn_gate.weight": (H, H), "ffn_up.weight": (H, H), "ffn_down.weight": (H, H),
}  # fmt: skip
NEXTN = {
    "nextn.eh_proj.weight": (H, 2 * H), "nextn.enorm.weight": (H,), "nextn.hnorm.weight": (H,),
    "nextn.shared_head_norm.weight": (H,),
}  # fmt: skip


def table(modules=1):
    """Name -> values as numpy orders them: the trunk, and `modules` blocks behind it."""
    shapes = {"token_embd.weight": (V, H), "output.weight": (V, H), "output_norm.weight": (H,)}
    for index in range(LAYERS + modules):
        mine = BLOCK if index < LAYERS else BLOCK | NEXTN
        shapes |= {f"blk.{index}.{rest}": shape for rest, shape in mine.items()}
    return {name: make(name, shape) for name, shape in shapes.items()}


def make(name, shape):
    values = 0.1 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return (values + (len(shape) == 1)).astype(np.float32)


def write(path, tensors=None, *, arch="qwen35", count=LAYERS + 1, modules=1, kinds=None, recurrent=0, sections=4):
    """kinds: name -> quantization, F32 where it has none."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(count)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 0.25])
    if modules:
        writer.add_nextn_predict_layers(modules)
    writer.add_array(f"{arch}.rope.dimension_sections", [4] * sections)
    if recurrent:
        writer.add_array(f"{arch}.attention.recurrent_layers", [True] * recurrent)
    for name, values in (table() if tensors is None else tensors).items():
        kind = (kinds or {}).get(name, Kind.I64 if values.dtype == np.int64 else Kind.F32)
        data = values if kind in (Kind.F32, Kind.I64) else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reported(path, **options):
    return [(each.rule, each.severity) for each in audit_gguf(write(path / "m.gguf", **options)).findings]


@loop(
    ("arch", "family"),
    [
        ("qwen35", "qwen3_5"), ("qwen35moe", "qwen3_5_moe"), ("qwen3next", "qwen3_next"), ("glm4moe", "glm4_moe"),
        ("glm-dsa", "glm_moe_dsa"), ("step35", "step3p5"), ("deepseek2", "glm4_moe_lite"), ("mimo2", "mimo_v2"),
        ("deepseek32", "deepseek_v32"), ("nemotron_h_moe", "nemotron_h"), ("hy_v3", "hy_v3"),
        ("cohere2moe", "cohere2_moe"),
    ],
)  # fmt: skip
def test_sound_file(arch, family, tmp_path):
    """A finding on a sound file, or an architecture that lost its row."""
    report = audit_gguf(write(tmp_path / "m.gguf", arch=arch))
    assert (report.family, report.declared, report.modules, report.findings) == (family, 1, (0,), ())


def test_promise(tmp_path):
    """llama.cpp#24737, #21172: the metadata's count against the blocks, each way that they can differ."""
    trunk = {name: values for name, values in table().items() if not name.startswith("blk.2.")}
    plain = {name: values for name, values in table().items() if "nextn" not in name}
    for arch, words in (("qwen35", "published with a head"), ("llama", "--init-head")):
        (note,) = audit_gguf(write(tmp_path / "m.gguf", trunk, modules=0, count=2, arch=arch)).findings
        assert (note.rule, note.severity, note.place) == ("head-none", "note", "general.architecture")
        assert words in note.fix
    assert reported(tmp_path, tensors=trunk) == [("head-absent", "error")]
    (pruned,) = audit_gguf(write(tmp_path / "m.gguf", plain)).findings  # llama-quantize --prune-layers 2
    assert pruned.rule == "head-absent"
    assert "leaves blk.2 out of the trunk" in pruned.found
    assert "set qwen35.nextn_predict_layers to 0" in pruned.fix
    for length, expected in ((3, []), (4, [("config-contradicts", "error")])):
        assert reported(tmp_path, recurrent=length) == expected
    assert reported(tmp_path, sections=3) == [("config-contradicts", "error")]  # of Ollama's exports
    assert reported(tmp_path, modules=0) == [("head-undeclared", "error")]
    assert reported(tmp_path, tensors=table(2), count=4, modules=1) == [("head-elsewhere", "error")]
    assert ("modules-missing", "error") in reported(tmp_path, count=4, modules=2)


def test_missing_tensors(tmp_path):
    """One part of the head, or of the decoder block that goes with it."""
    for name, expected in (
        ("blk.2.nextn.eh_proj.weight", [("head-partial", "error")]),
        ("blk.2.nextn.shared_head_norm.weight", [("head-partial", "note")]),
        ("blk.2.attn_norm.weight", [("head-partial", "error")]),
        ("blk.2.attn_q.weight", [("head-partial", "warning")]),
    ):
        tensors = table()
        del tensors[name]
        report = audit_gguf(write(tmp_path / "m.gguf", tensors))
        assert [(each.rule, each.severity) for each in report.findings] == expected
        assert name.removesuffix(".weight") in report.findings[0].place


def test_a_trunk_that_norms_after_attention(tmp_path):
    """EXAONE-4.5 has no attn_norm in any block: its head must not be asked for one."""
    tensors = {name: values for name, values in table().items() if not name.endswith("attn_norm.weight")}
    assert reported(tmp_path, tensors=tensors) == []


def test_copies(tmp_path):
    """llama.cpp drafts with the copy where there is one: another model's, or a coarser one, is told."""
    name = "blk.2.nextn.shared_head_head.weight"
    same = table() | {name: table()["output.weight"]}
    other = table() | {name: make("other", (V, H))}
    assert reported(tmp_path, tensors=same, arch="glm4moe") == []
    assert reported(tmp_path, tensors=same, arch="glm4moe", kinds={name: Kind.Q8_0}) == [("copy-differs", "note")]
    assert reported(tmp_path, tensors=other, arch="glm4moe") == [("copy-differs", "warning")]
    assert reported(tmp_path, tensors=other, arch="glm4moe", kinds={name: Kind.Q8_0}) == [("copy-differs", "warning")]
    assert reported(tmp_path, tensors=other, arch="step35") == []
    (found,) = audit_gguf(write(tmp_path / "m.gguf", tensors=same, arch="glm4moe", kinds={name: Kind.Q8_0})).findings
    assert "--tensor-type nextn.shared_head_head=f32" in found.fix


def test_precision(tmp_path):
    """A head below the trunk's bits is told, as much as it is below; one of the trunk's own bits is not."""
    projection, block = "blk.2.nextn.eh_proj.weight", [f"blk.2.{name}" for name in BLOCK if "norm" not in name]
    trunk = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in BLOCK if "norm" not in name]
    everything, lower = [projection, *block, *trunk], "precision-lower"
    for kinds, expected in (
        ({projection: Kind.Q4_0}, [(lower, "note")]),
        ({projection: Kind.Q8_0}, []),
        ({projection: Kind.BF16}, []),
        (dict.fromkeys(block, Kind.Q4_0), [(lower, "warning")]),
        (dict.fromkeys(trunk, Kind.Q8_0) | dict.fromkeys(block, Kind.Q5_1), [(lower, "warning")]),
        (dict.fromkeys(everything, Kind.Q4_0), []),
        (dict.fromkeys(everything, Kind.Q4_0) | dict.fromkeys(trunk[1::2], Kind.Q8_0), []),
        (dict.fromkeys(everything, Kind.Q8_0) | {block[0]: Kind.Q4_0}, [(lower, "warning")]),
    ):
        assert reported(tmp_path, kinds=kinds) == expected, kinds
    (found,) = audit_gguf(write(tmp_path / "m.gguf", kinds=dict.fromkeys(block, Kind.Q4_0))).findings
    assert r"--tensor-type 'blk\.2\.=q8_0'" in found.fix


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("part", ["head", "trunk"])
def test_shifted_norm_weights(part, by, tmp_path):
    """A converter that adds the 1 of Qwen's norms to one side alone, or twice."""
    tensors = table()
    for name in tensors:
        if name.endswith("norm.weight") and name.startswith("blk.2.") == (part == "head"):
            tensors[name] = tensors[name] + np.float32(by)
    report = audit_gguf(write(tmp_path / "m.gguf", tensors))
    assert {(each.rule, each.severity) for each in report.findings} == {("norm-weights-shifted", "warning")}
    assert f"of the {part} are 1 {'above' if by > 0 else 'below'}" in report.findings[0].found


def test_numbers(tmp_path):
    """A projection of zeros or NaN drafts one token for ever."""
    for value, rule in ((0.0, "values-zero"), (np.nan, "values-nonfinite")):
        tensors = table()
        tensors["blk.2.nextn.eh_proj.weight"][...] = value
        assert reported(tmp_path, tensors=tensors) == [(rule, "error")]


def test_engines(tmp_path):
    """A head that llama.cpp carries and never runs, and an architecture without a row."""
    assert reported(tmp_path, arch="exaone-moe") == [("engine-loads", "warning")]
    assert reported(tmp_path, arch="deepseek4") == []
    assert reported(tmp_path, arch="llama") == [("engine-absent", "warning")]


def test_names_of_a_fork(tmp_path):
    """Beside a complete head or without one, what llama.cpp does not read is named."""
    fork = table() | {"mtp.fc_embd.weight": make("mtp.fc_embd.weight", (32, 32))}
    assert reported(tmp_path, tensors=fork) == [("names-unknown", "warning")]
    outside = table(0) | {"mtp.fc.weight": make("mtp.fc.weight", (H, 2 * H)), "mtp.norm.weight": make("mtp.norm", (H,))}
    assert reported(tmp_path, tensors=outside, count=LAYERS, modules=0) == [("names-unknown", "warning")]


def test_split(tmp_path):
    """The head may lie in another file of a split model; a file that is absent is named."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35", split_max_tensors=20)
    writer.add_block_count(LAYERS + 1)
    writer.add_nextn_predict_layers(1)
    for name, values in table().items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    assert audit_gguf(first).findings == audit_gguf(second).findings == ()
    for path, key, other in ((second, "split.no", first), (first, "split.tensors.count", second)):
        old = path.read_bytes()
        field = gguf.GGUFReader(path, "r+").get_field(key)
        field.parts[field.data[0]][0] += 1  # as after blocks were added by hand
        with pytest.raises(CheckpointError, match=f"{key} is"):
            audit_gguf(other)
        path.write_bytes(old)
    second.unlink()
    with pytest.raises(CheckpointError, match=second.name):
        audit_gguf(first)


@pytest.mark.parametrize(("arch", "kind"), [("clip", ""), ("imatrix", "imatrix"), ("qwen35", "adapter")])
def test_files_that_are_no_model(arch, kind, tmp_path):
    """What llama.cpp's tools put beside a model is named, in place of a key that it lacks."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    if kind:
        writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight", np.ones((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"this is (the vision|an importance|an adapter)"):
        audit_gguf(tmp_path / "m.gguf")


def test_a_draft_that_shares_its_embedding(tmp_path):
    """It draws on the target's, which llama.cpp's older versions do not do."""
    own = {name: values for name, values in table().items() if name.startswith(f"blk.{LAYERS}.")}
    assert any("embedding" in each for each in audit_gguf(write(tmp_path / "m.gguf", own)).unchecked)
    assert not audit_gguf(write(tmp_path / "n.gguf")).unchecked


def test_architectures_that_nextn_does_not_decode(tmp_path):
    """Neither train nor any other command loads them: the way to a head is the original checkpoint."""
    for arch, is_read in (("gemma2", False), ("llama", True), ("gemma3", True)):
        report = audit_gguf(write(tmp_path / f"{arch}.gguf", table(0), modules=0, count=2, arch=arch))
        (note,) = report.findings
        assert note.rule == "head-none"
        assert ("safetensors checkpoint" in note.fix) != is_read
        assert ("llama.cpp decodes" in note.valid) != is_read
        assert any("decodes no GGUF" in each for each in report.unchecked) != is_read


def test_says_too_little(tmp_path):
    """No tensor, no architecture, no count of blocks, more modules than blocks, no GGUF at all."""
    with pytest.raises(CheckpointError, match="no tensor"):
        audit_gguf(write(tmp_path / "m.gguf", {}, count=0, modules=0))
    with pytest.raises(CheckpointError, match="of 2 blocks"):
        audit_gguf(write(tmp_path / "m.gguf", count=2, modules=3))
    with pytest.raises(CheckpointError, match="block_count"):
        audit_gguf(write(tmp_path / "m.gguf", count=1 << 31))
    for data in (b"", b"GGUF", b"PK\3\4" * 9, b"GGUF" + (1).to_bytes(4, "little") + bytes(16)):
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match="not a valid GGUF file"):
            audit_gguf(tmp_path / "bad.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        audit_gguf(tmp_path / "none.gguf")


def test_without_the_package(tmp_path, monkeypatch):
    """An extra that is absent is an error with its pip line, not a traceback."""
    original = builtins.__import__

    def refuse(name, *args, **options):
        if name == "gguf":
            raise ImportError(name)
        return original(name, *args, **options)

    path = write(tmp_path / "m.gguf")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'gguf>="):
        audit_gguf(path)


def test_counts_that_lie(tmp_path):
    """Any count can claim 2**63 of something: refused by what is there, before anything is made of it."""
    sound = write(tmp_path / "m.gguf").read_bytes()
    for at in (8, 16, 24, sound.index(b"tokenizer.ggml.tokens") + 21 + 8, sound.index(b"blk.0.") - 8):
        for claim in (2**63, 2**40, 2**32 + 5):
            path = tmp_path / "lie.gguf"
            path.write_bytes(sound[:at] + claim.to_bytes(8, "little") + sound[at + 8 :])
            with pytest.raises(CheckpointError):
                audit_gguf(path)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutations(tmp_path):
    """Truncated, flipped and overwritten files end in a report or in CheckpointError."""
    sound = write(tmp_path / "m.gguf", kinds={"blk.2.nextn.eh_proj.weight": Kind.Q8_0}).read_bytes()
    header = sound.index(b"blk.2.nextn.shared_head_norm.weight") + 80
    rng = np.random.default_rng(0)
    path = tmp_path / "bad.gguf"
    refused = 0
    for step in range(500):
        data = bytearray(sound[: rng.integers(1, len(sound))] if step % 5 == 0 else sound)
        for at in rng.integers(0, min(header, len(data)), rng.integers(1, 6)):
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
        path.write_bytes(data)
        try:
            audit_gguf(path)
        except CheckpointError:
            refused += 1
    assert 100 < refused < 500


def test_no_head_beside_a_gguf(tmp_path, here):
    """It would be left out of the audit without a word."""
    code, _, err = here("audit", tmp_path / "model.gguf", "--head", tmp_path / "head")
    assert code == 2
    assert "a head beside" in err


def offsets(path):
    """Name -> where its offset stands in the header."""
    data, found = path.read_bytes(), {}
    for name in table():
        at = data.rfind(len(name).to_bytes(8, "little") + name.encode()) + 8 + len(name)
        found[name] = at + 4 + 8 * int.from_bytes(data[at : at + 4], "little") + 4
    return found


def test_tensors_that_share_bytes(tmp_path):
    """Overlapping and unaligned tensors, which llama.cpp refuses, and which would be converted to other weights."""
    whole = write(tmp_path / "whole.gguf")
    at = offsets(whole)["blk.0.attn_q.weight"]
    second = int.from_bytes(whole.read_bytes()[offsets(whole)["blk.0.attn_k.weight"] :][:8], "little")
    own = int.from_bytes(whole.read_bytes()[at : at + 8], "little")
    wrong = {0: "overlaps", second: "overlaps", second - 64: "overlaps", own + 13: "multiple of 32"}
    for offset, message in (wrong | {2**63: "ends at byte", 2**64 - 32: "ends at byte"}).items():
        data = bytearray(whole.read_bytes())
        data[at : at + 8] = offset.to_bytes(8, "little")
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            audit_gguf(tmp_path / "m.gguf")


def test_empty_and_unknown_tensors(tmp_path):
    """A dimension of 0, and a type of a fork: IQ4_K of ik_llama.cpp, in which heads of GLM-4.5 are published."""
    whole = write(tmp_path / "whole.gguf")
    place = offsets(whole)["blk.0.attn_q.weight"]
    for at, value, message in (
        (place - 20, 0, r"dimensions \(0, 32\), none may be 0"),
        (place - 4, 139, "has type 139"),
    ):
        data = bytearray(whole.read_bytes())
        data[at : at + 4] = value.to_bytes(4, "little")
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            audit_gguf(tmp_path / "m.gguf")


@loop("name, entries, severity", [("d2t", V // 2, "warning"), ("blk.2.nextn.d2t.weight", V // 2, "warning"),
                                  ("d2t", V // 4, "error")])  # fmt: skip
def test_a_head_that_drafts_a_part_of_the_vocabulary(name, entries, severity, tmp_path):
    """Its lm_head is no copy of the trunk's; an lm_head and a map of other sizes do not belong together."""
    head = {"blk.2.nextn.shared_head_head.weight": make("head", (V // 2, H)), name: np.arange(entries, dtype=np.int64)}
    found = audit_gguf(write(tmp_path / "m.gguf", table() | head)).findings
    assert [(each.rule, each.severity, each.place) for each in found if each.severity != "note"] == [
        ("copy-differs", severity, name)
    ]
