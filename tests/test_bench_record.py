"""Records of benchmarks name the day and the machine."""

import json
import re
from datetime import date
from pathlib import Path

from record import origin, write_record

from nextn.evaluate.decoding_costs import processor_name

BENCH = Path(__file__).parents[1] / "bench"


def test_a_record_names_its_day_and_machine(tmp_path):
    write_record(tmp_path / "out.json", {"threads": 7, "figure": 1.5})
    found = json.loads((tmp_path / "out.json").read_text())
    date.fromisoformat(found["date"][:10])
    assert (found["machine"], found["figure"]) == (processor_name(), 1.5)
    assert found["threads"] == 7  # its own before torch's
    write_record(None, found)


def test_every_benchmark_that_writes_a_record_names_them():
    """It calls `write_record`, or adds `origin` to what it writes step by step; gpu.py names the GPU itself."""
    text = {path.name: path.read_text() for path in BENCH.glob("*.py") if path.name not in ("record.py", "gpu.py")}
    writers = {name for name, code in text.items() if re.search(r"write_json\((?:args\.|options\.)?out, ", code)}
    assert writers == {name for name in writers if "origin()" in text[name]}
    assert not [name for name, code in text.items() if re.search(r"\bout\.write_text\(json", code)]
    assert "date" in origin()
