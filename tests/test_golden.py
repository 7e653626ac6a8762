"""What the library computes is what it was: tokens and counts exactly, floats to 1e-5 relative.

The tolerance is for other processors, whose vector units round sums otherwise: between AVX-512 and AVX2 the intervals
of sampled acceptance differ by more than 1e-6 and by less than 1e-5. On one machine floats are equal to the last bit.
"""

import json

import golden_adapter
import pytest
from make_golden import GOLDEN, plain
from quick import others_slow

_TOLERANCE = 1e-5
_SECTIONS = ("decode", "text", "measure", "audit", "trace", "bench")


def differences(golden: object, found: object, place: str = "") -> list[str]:
    """Where two values of JSON differ; integers, strings and lengths exactly, floats by the tolerance."""
    if isinstance(golden, dict) and isinstance(found, dict) and golden.keys() == found.keys():
        return [line for key in golden for line in differences(golden[key], found[key], f"{place}.{key}")]
    if isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        pairs = enumerate(zip(golden, found, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{place}[{index}]")]
    if isinstance(golden, float) and isinstance(found, float):
        same = found == pytest.approx(golden, rel=_TOLERANCE, abs=_TOLERANCE)
    else:
        same = type(golden) is type(found) and golden == found
    return [] if same else [f"{place.removeprefix('.')}: {found}, was {golden}"]


@pytest.mark.parametrize("section", _SECTIONS)
@pytest.mark.parametrize("name", others_slow(golden_adapter.NAMES, "glm", "qwen"))
def test_results_are_what_they_were(name, section, trained):
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    sections = golden_adapter.sections(name, trained[name])
    assert golden.keys() == sections.keys() == set(_SECTIONS)
    found = json.loads(json.dumps(plain(sections[section]())))
    assert differences(golden[section], found) == []


def test_every_file_belongs_to_a_fixture():
    assert sorted(path.stem for path in GOLDEN.iterdir()) == list(golden_adapter.NAMES)


def test_differences_are_found():
    golden = {"tokens": [1, 2], "rate": 0.5, "none": None}
    assert differences(golden, {"tokens": [1, 2], "rate": 0.5 * (1 + 1e-6), "none": None}) == []
    assert differences(golden, {"tokens": [1, 3], "rate": 0.5 * (1 + 1e-4), "none": 0.0}) == [
        "tokens[1]: 3, was 2",
        "rate: 0.50005, was 0.5",
        "none: 0.0, was None",
    ]
    assert differences(golden, golden | {"tokens": [1]})
    assert differences(golden, {"tokens": [1, 2], "rate": 0.5})
    assert differences([1], [1.0])
