"""`nextn serve`: its options are checked before a model is loaded, and errors are one line."""

import json
import socket
import sys

import pytest
from quick import loop

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.errors import ConfigError
from nextn.serve.options import allowed_hosts, listen, reference_rates
from nextn.text_format import install_command


@loop(
    ("options", "words"),
    [
        (["--port", "70000"], "127.0.0.1 port 70000: expected a port of 0 to 65535;"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "that variable holds no key"),
        (["--reference", "nowhere.json"], "--reference nowhere.json: cannot be read: No such file"),
        (["--reference", str(SHIPPED / "config.json")], "not a record of `nextn measure --out`"),
        (["--backend", "fast"], "backend 'fast'; expected one of"),
        (["--print", "tgi"], "--print tgi"),
        (["--print", "vllm", "-k", "0"], "-k 0: the command serves with the head; expected at least 1 draft"),
        (["--print", "sglang", "--num-speculative-tokens", "-2"], "-k -2: the command"),
        (["--print", "vllm", "--fixed-k", "--dtype", "float32", "-k", "2"], "leave out --fixed-k, --dtype, and"),
        (["--tool-call-parser", "gpt"], "tool-call parser 'gpt'; expected one of qwen_xml, glm_xml, hermes"),
        (["--request-timeout", "-1"], "--request-timeout -1; expected 0 to"),
        (["--request-timeout", "nan"], "--request-timeout nan; expected 0 to"),
        (["--grace", "nan"], "--grace nan; expected 0 to"),
        (["--grace", "1e300"], "--grace 1e+300; expected 0 to"),
        (["--cache-gb", "nan", "--port", "0"], "cache_gb = nan; expected"),
        (["--max-num-seqs", "0", "--port", "0"], "max_num_seqs = 0; expected"),
        (["--max-model-len", "1"], "max_model_len = 1; expected"),
        (["-k", "99"], "num_speculative_tokens = 99; expected from 0 to 16"),
        (["--max-model-len", "100000000", "--port", "0"], "do not fit"),
    ],
)
def test_bad_options(here, options, words, monkeypatch):
    if words != "do not fit":  # all others need neither torch nor the web framework, whose import takes seconds
        for module in ("nextn.model.model", "nextn.serve.http_server"):
            monkeypatch.setitem(sys.modules, module, None)
    code, out, err = here("serve", SHIPPED, *options)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")  # after "loading", if the model has to be read first
    assert words in err


def test_an_address_in_use(here):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code, _, err = here("serve", SHIPPED, "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in err


def test_a_missing_extra_is_named(here, monkeypatch):
    module = sys.modules["nextn.cli.serve"]
    find = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    code, _, err = here("serve", SHIPPED)
    assert (code, err) == (2, f"error: the server needs uvicorn: {install_command('serve')}\n")


def test_a_key_with_a_line_break_is_refused(here, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "a\nb")
    code, _, err = here("serve", SHIPPED, "--api-key-env", "SERVER_KEY")
    assert code == 2
    assert "a\nb" not in err


def test_hosts():
    """A server on the loopback answers to its names only; one for other machines, to any."""
    assert "localhost" in allowed_hosts("127.0.0.1")
    assert allowed_hosts("0.0.0.0") is None
    with listen("::1", 0) if socket.has_ipv6 else listen("127.0.0.1", 0) as free:
        assert free.getsockname()[1] > 0


def test_reference_rates(tmp_path):
    """Those of the lowest temperature and the largest K, over all texts."""

    def entry(temperature, k, domain, rates):
        return {"temperature": temperature, "num_speculative_tokens": k, "domain": domain, "acceptance": rates}

    path = tmp_path / "measure.json"
    figures = [
        entry(1.0, 3, "all", [0.5, 0.4, 0.3]),
        entry(0.0, 1, "all", [0.9]),
        entry(0.0, 3, "code", [0.1, 0.1, 0.1]),
        entry(0.0, 3, "all", [0.9, 0.8, None]),
    ]
    path.write_text(json.dumps({"figures": figures}))
    assert reference_rates(path) == reference_rates(tmp_path) == (0.9, 0.8, 0.0)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a record"):
        reference_rates(path)
