"""Every check of `nextn verify` against the server of `nextn serve`, with MTP and without."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from http_serving import Serving, serving

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.model.model import Model
from nextn.serve.engine import ServingEngine
from nextn.serve.options import EngineOptions
from nextn.verify_checks import CHECKS

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or () %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@contextmanager
def served(model: Model, num_speculative_tokens: int) -> Iterator[Serving]:
    options = EngineOptions(
        "native",
        max_num_seqs=8,
        max_model_len=1024,
        cache_gb=0.5,
        num_speculative_tokens=num_speculative_tokens,
        warmup=False,
    )
    engine = ServingEngine(model, options)
    try:
        with serving(engine, model, max_model_len=1024, tool_call_parser="hermes") as server:
            yield server
    finally:
        engine.close(grace_s=1)


@pytest.mark.slow
def test_every_check_passes(here):
    model = Model.load(SHIPPED)
    model.tokenizer.chat_template = TEMPLATE
    plain = replace(model, head=None)
    with ExitStack() as stack:
        mtp, baseline = (stack.enter_context(served(*each)) for each in ((model, 4), (plain, 0)))
        code, out, err = here("verify", mtp.url, "--against", baseline.url, "--context", 1024, "--strict", "--json")
    record = json.loads(out)
    assert code == 0, (err, record)
    assert {each["name"]: each["outcome"] for each in record["checks"]} == dict.fromkeys(CHECKS, "passed")
