"""The torch path on a CUDA device (`make test-gpu`): the texts and counts that CPUs give."""

import pytest
import torch
from tiny import CONFIGS, MOST, build, decode, prompt, refrain

from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_drafts_change_no_text(name):
    """Every family, prompts of different lengths."""
    model = build(name, modules=MOST[name]).to(CUDA)
    assert (backend_for(model).name, backend_for(model).trunk.device.type) == ("torch", "cuda")
    prompts = [prompt(length, seed=length) for length in (3, 17, 40)]
    texts, _ = decode(model, prompts, num_speculative_tokens=3, max_tokens=10)
    assert texts == decode(model, prompts, num_speculative_tokens=0, max_tokens=10)[0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, top_k=9), Sampling(1.0, top_p=0.8)])
@pytest.mark.parametrize("name", ["glm", "glm_two", "qwen", "v4", "step"])
def test_trained_heads_decode_as_on_cpus(name, sampling, fixture_folder):
    prompts = refrain(3, 33, seed=10**6).tolist()
    logs = []
    for device in ("cpu", "cuda"):
        model = Model.load(fixture_folder / name, dtype=torch.float32, device=device)
        logs.append(decode(model, prompts, num_speculative_tokens=4, max_tokens=24, sampling=sampling)[1])
    assert [each.rows for each in logs[0]] == [each.rows for each in logs[1]]
