"""Costs with other numbers of cores: the roofline, and what `nextn advise --cores` shows."""

import json

import pytest

from nextn.evaluate.core_scaling import predict_step
from nextn.runtime.native.abi import load
from nextn.settings import available_cores


def test_cores_share_a_pass_until_memory_bounds_it():
    assert predict_step(0.8, 1, 10**9, 2e9) == 0.8
    assert predict_step(0.8, 2, 10**8, 2e9) == 0.4
    assert predict_step(0.8, 4, 10**9, 2e9) == 0.5


def test_another_number_of_threads_for_a_while():
    runtime = load()
    before = runtime.num_threads
    with runtime.with_threads(before + 1):
        assert runtime.num_threads == before + 1
    assert runtime.num_threads == before


@pytest.mark.slow
def test_advice_for_other_cores(here, tmp_path):
    """Measured where this machine has the cores, predicted from one core everywhere."""
    (tmp_path / "prompts.txt").write_text("def f(x):\n")
    options = ["--prompts", tmp_path / "prompts.txt", "--batches", 1, "--max-tokens", 8, "--temperatures", 0, "-k", 4]
    code, out, _ = here("advise", "tiny", *options, "--cores", "1,64", "--memory-bandwidth", "1MB/s", "--json")
    record = json.loads(out)["cores"]
    one, many = record["forecasts"]
    assert code == 0
    assert record["bandwidth"] == 1e6
    assert [one["cores"], many["cores"], many["measured_s"]] == [1, 64, None]
    assert len(one["measured_s"]) == 5
    assert many["predicted_s"] == [record["step_bytes"] / 1e6] * 5  # bound by so slow a memory
    code, out, _ = here("advise", "tiny", *options, "--cores", "1", "--memory-bandwidth", "1TB/s")
    assert code == 0
    assert "v(5)" in out
    assert "v(9)" not in out


def test_refused_numbers_of_cores(here):
    more = available_cores() + 1
    for given, words in (
        (["--cores", more], f"--cores {more}: there are {more - 1} here"),
        (["--cores", "0,2"], "--cores '0,2'; expected comma-separated whole numbers >= 1"),
        (["--cores", "1", "--offload-bandwidth", "1GB/s"], "--cores is for models whose experts are in memory"),
    ):
        code, _, complaint = here("advise", "tiny", *given)
        assert code == 2
        assert words in complaint
