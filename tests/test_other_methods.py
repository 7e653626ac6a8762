"""Trunks quantized by methods that nextn does not read, beside a plain head: nothing of theirs is missing."""

from artifacts import publish
from quick import loop
from test_audit import findings
from test_other_tools import raw

from nextn.audit_rules import audit
from nextn.edit.restore import restore

# Suffix -> dtype and shape of what each method stores for a matrix [rows, columns], by its own code.
METHODS = {
    "eetq": lambda r, c: {"weight": ("I8", (c, r)), "weight_scales": ("F16", (r,))},
    "higgs": lambda r, c: {"weight": ("U8", (r // 2, c)), "scales": ("F16", (r, 1)), "tables": ("F16", (16, 2)),
                           "tables2": ("F16", (16, 16, 2))},
    "spqr": lambda r, c: {"dense_weights": ("I64", (r * c // 16,)), "row_offsets": ("I32", (r + 1,)),
                          "in_perm": ("I16", (c,))},
    "vptq": lambda r, c: {"indices": ("I32", (1, r, c // 8)), "centroids.weight": ("BF16", (1, 64)),
                          "weight_scale": ("BF16", (c,)), "weight_bias": ("BF16", (c,))},
    "sinq": lambda r, c: {"W_q": ("U8", (r, c // 2)), "scale": ("F16", (r, 1)), "zero": ("F16", (r, 1))},
    "hqq": lambda r, c: {"W_q": ("U8", (r, c // 2)), "scale": ("F32", (r, 1)), "shape": ("I64", (2,))},
    "exl2": lambda r, c: {"q_weight": ("I32", (c // 8, r)), "q_scale": ("I32", (1, r // 8)), "q_groups": ("I16", (2,))},
    "quip": lambda r, c: {"Qidxs": ("I64", (r, c // 8)), "SU": ("F16", (c,)), "SV": ("F16", (r,))},
    "svdquant": lambda r, c: {"qweight": ("I8", (r, c // 2)), "wscales": ("BF16", (1, r)), "proj_up": ("BF16", (r, 4))},
    "turboquant": lambda r, c: {"indices_packed": ("U8", (r, c // 2)), "norms": ("F32", (r,))},
}  # fmt: skip
PLAIN = ("in_proj_a", "in_proj_b", "conv1d")


def quantized(folder, method, **options):
    """A dense Qwen3.5 whose trunk's matrices are stored as the method does."""

    def change(table):
        for name in [each for each in table if each.startswith("model.layers.") and len(table[each].shape) == 2]:
            if name.split(".")[-2] not in PLAIN:
                stem, shape = name.removesuffix("weight"), table.pop(name).shape
                table |= {stem + part: raw(*form) for part, form in METHODS[method](*shape).items()}

    return publish(
        folder, "qwen3_5", change=change, config={"quantization_config": {"quant_method": method}}, **options
    )


@loop("method", METHODS)
def test_a_trunk_of_another_method_lacks_nothing(method, tmp_path):
    """Neither trunk nor head: parts of names that nextn does not know, and a head without them."""
    assert not findings(quantized(tmp_path, method))


@loop("method", ["eetq", "spqr"])
def test_a_head_that_only_transformers_could_skip(method, tmp_path):
    """No engine with MTP reads the method, so that the list of unquantized modules is no error, and is extended."""
    folder = quantized(tmp_path / "model", method)
    (note,) = (each for each in audit(folder).findings if each.rule == "quantization")
    assert (note.severity, method in note.found) == ("note", True)
    restore(folder, publish(tmp_path / "base", "qwen3_5"), force=True)
    assert not [each for each in audit(folder).findings if each.rule == "quantization"]
