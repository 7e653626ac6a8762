"""Wrong options are refused before torch is imported, which takes seconds."""

import json
import re
import subprocess
import sys

import pytest

# Runs commands one after the other -> exit code, stderr, whether torch was imported.
RUN = """
import contextlib, io, json, sys
from nextn.cli import main
for arguments in json.load(sys.stdin):
    sys.argv = ["nextn", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as ended:
            print(json.dumps([ended.code, said.getvalue(), "torch" in sys.modules]))
"""
MODEL = "{model}"


CASES = [
    (["generate", MODEL, "text", "--dtype", "int3"], "dtype 'int3'; expected one of auto, float32, bfloat16"),
    (["generate", MODEL, "text", "--backend", "quick"], "backend 'quick'; expected one of auto, native, torch"),
    (["generate", MODEL, "text", "--device", "gpu"], "device = 'gpu'; expected auto, cpu"),
    (
        ["generate", MODEL, "text", "--num-speculative-tokens", "-1"],
        "num_speculative_tokens = -1; expected a whole number >= 0",
    ),
    (["generate", MODEL, "text", "-k", str(2**31)], "num_speculative_tokens = 2147483648; expected"),
    (["generate", MODEL, "text", "--copy", "9" * 20], "num_copy_tokens = 99999999999999999999; expected"),
    (["generate", MODEL, "text", "--max-tokens", "9" * 300], "expected a whole number >= 1, at most 2147483647"),
    (["generate", MODEL, "text", "--seed", "9" * 20], "seed = 99999999999999999999; expected a whole number"),
    (["generate", MODEL, "text", "--top-p", "7"], "top_p=7.0 must be above 0"),
    (["generate", MODEL, "text", "--draft-vocab", "none.txt:9"], "--draft-vocab none.txt:9: not a readable"),
    (["generate", "nowhere", "text"], "nowhere: neither a folder"),
    (["trace", "nowhere", "text"], "nowhere: neither a folder"),
    (["bench", MODEL, "--prompts", "none.txt"], "none.txt: cannot be read"),
    (["bench", MODEL, "-k", "a"], "--num-speculative-tokens 'a'; expected comma-separated whole numbers"),
    (["bench", MODEL, "--repeats", "0"], "repeats = 0; expected"),
    (["advise", MODEL, "--temperatures", "warm"], "--temperatures 'warm'; expected comma-separated numbers"),
    (["advise", MODEL, "--batches", "0"], "--batches '0'; expected comma-separated whole numbers >= 1"),
    (["advise", "nowhere"], "nowhere: neither a folder"),
    (["measure", MODEL, "--max-tokens", "1"], "max_tokens = 1; expected 3 or more"),
    (["measure", MODEL, "--prompts", "none.jsonl"], "none.jsonl: no such file"),
    (["answer", MODEL, "out.jsonl", "--prompts", "none.txt"], "none.txt: no such file or folder"),
    (["diagnose", MODEL, "--engine", "log.txt", "--prompts", "none.txt"], "none.txt: cannot be read"),
    (["diagnose", MODEL, "--engine", "log.txt", "--rule", "luck"], "rule = 'luck'; expected one of"),
    (["train", "out", "--data", "none.txt"], "none.txt: no such file or folder"),
    (["train", "out", "--model", "none.json"], "--model none.json: no such file"),
    (["train", "out", "--freeze-trunk", "--from", "nowhere"], "nowhere: neither a folder"),
    *(
        ([command, "some.gguf", *more], "some.gguf: not a valid GGUF file")
        for command, more in (
            ("generate", ["text"]), ("trace", ["text"]), ("chat", []), ("bench", []), ("advise", []),
            ("measure", []), ("answer", ["out.jsonl", "--prompts", "some.gguf"]), ("diagnose", ["--engine", "log.txt"]),
        )
    ),
    (["generate", MODEL, "text", "--head", "some.gguf"], "`nextn convert some.gguf OUT`"),
    (["train", "out", "--freeze-trunk", "--from", "some.gguf"], "`nextn convert some.gguf OUT`"),
]  # fmt: skip


@pytest.mark.more
def test_refused_without_torch(fixture_folder, tmp_path):
    """All in one process, so that the cases take no longer than one start of it."""
    model = str(min(fixture_folder.iterdir()))
    given = json.dumps([[model if each == MODEL else each for each in arguments] for arguments, _ in CASES])
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, words), (code, said, torch) in zip(CASES, results, strict=True):
        assert words in said, (arguments, said)
        assert (code, torch) == (2, False), arguments
        assert said.startswith("error: ")
    assert [each.name for each in tmp_path.iterdir()] == ["some.gguf"]  # nothing is written


def test_serve_refuses_a_broken_file(here, tmp_path):
    """It imports torch first, which the others must not."""
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    code, _, said = here("serve", tmp_path / "some.gguf")
    assert code == 2
    assert re.fullmatch(r"error: \S+some.gguf: not a valid GGUF file.*", said.strip(), re.DOTALL)
