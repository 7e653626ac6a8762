"""The hidden states on disk: they are the trunk's, in every family; going on, refusing, and no more than allowed."""

import json
import shutil

import numpy as np
import pytest
import torch
from quick import families
from tiny import CONFIGS, build

from nextn.data.batches import Batches
from nextn.data.corpus import Corpus, Document
from nextn.errors import CheckpointError, ConfigError
from nextn.train.checkpointing import fingerprint
from nextn.train.distributed import Ranks
from nextn.train.hidden_cache import KEY, HiddenStateCache


def corpus(seed=0, *, masked=True):
    numbers = np.random.default_rng(seed)
    parts = []
    for size in (40, 25, 60, 33):
        ids = numbers.integers(0, 60, size)
        parts.append(Document("", ids, ids % 3 == 0 if masked else None))
    return Corpus.from_documents(parts, lambda texts: [[10] for _ in texts], 63)


def dealt(model, text=None, **changes):
    options = {"batch_size": 2, "length": 12, "seed": 3, "pack": model.trunk.can_pack} | changes
    return Batches(text or corpus(), **options)


def cached(model, folder, num=5, batches=None, **options):
    return HiddenStateCache(model.trunk, batches or dealt(model), num, folder, **{"shard_bytes": 1, **options})


class Apart(Ranks):
    """One of several processes that hears nothing of the others."""

    def total(self, values):
        return values

    def any(self, flag):
        return flag


def filled(*args, **options):
    made = cached(*args, **options)
    list(made.fill())
    return made


@pytest.fixture(scope="module")
def model():
    return build("glm4_moe")


@pytest.mark.parametrize("name", families(CONFIGS))
def test_they_are_the_trunks_states(name, tmp_path):
    """Every stage: states before or after the final norm, streams, scaled logits. In the trunk's dtype, to the bit."""
    model = build(name)
    batches = dealt(model)
    cache = filled(model, tmp_path, 3, batches, dtype=None)
    for place, index in enumerate(cache._order(0).tolist()):
        batch, hidden = cache.batch(place)
        wanted = batches.batch(index)
        with torch.no_grad():
            made = model.trunk(wanted.tokens, documents=wanted.documents)
        for part, value in (("tokens", batch), ("documents", batch), ("mask", batch), ("head_input", hidden)):
            source = made if part == "head_input" else wanted
            assert torch.equal(getattr(value, part), getattr(source, part))
        assert torch.equal(hidden.final_hidden, made.final_hidden)
        assert (batch.tokens.dtype, hidden.head_input.dtype) == (torch.int64, model.trunk.dtype)


def test_each_epoch_has_all_batches_in_its_own_order(model, tmp_path):
    """Catches batches left out, one order for all epochs, and steps that depend on what was asked before."""
    cache = filled(model, tmp_path)
    firsts = [tuple(cache.batch(step)[0].tokens.flatten().tolist()) for step in range(15)]
    epochs = [firsts[start : start + 5] for start in (0, 5, 10)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len(set(epochs[0])) == 5
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = cached(model, tmp_path)
    assert [tuple(again.batch(step)[0].tokens.flatten().tolist()) for step in (11, 3)] == [firsts[11], firsts[3]]


def test_ranks_share_a_batch(model, tmp_path):
    """Rows of two ranks are the rows of one, tokens and states alike; and each rank fills its own shards."""
    one = filled(model, tmp_path / "one")
    two = cached(model, tmp_path / "two")
    for rank in range(2):
        assert len(list(two.fill(ranks=Apart(rank, 2)))) == (4 if rank == 0 else 3)
    for step in range(5):
        batch, hidden = one.batch(step)
        for rank in range(2):
            part, states = two.batch(step, rank=rank, world=2)
            assert torch.equal(part.tokens, batch.tokens[rank::2])
            assert torch.equal(part.mask, batch.mask[rank::2])
            assert torch.equal(states.head_input, hidden.head_input[rank::2])


def test_bfloat16_and_what_it_takes(model, tmp_path):
    """The bytes that were told are those on disk; states are rounded, and come back in the trunk's dtype."""
    cache = filled(model, tmp_path / "half", shard_bytes=10**9)
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == [KEY, "hidden-00000.safetensors"]
    overhead = (tmp_path / "half" / "hidden-00000.safetensors").stat().st_size - cache.nbytes
    assert 0 < overhead < 4000
    assert cache.nbytes == 5 * 2 * 12 * (4 + 4 + 1 + 2 * 32)
    whole = filled(model, tmp_path / "whole", dtype=None)
    assert len(list((tmp_path / "whole").glob("hidden-*"))) == 5
    states, exact = cache.batch(1)[1].head_input, whole.batch(1)[1].head_input
    assert states.dtype == torch.float32
    assert torch.equal(states, exact.bfloat16().float())


def test_going_on_makes_only_what_is_missing(model, tmp_path, monkeypatch):
    """Stopped, torn and removed shards: only these are made again, and the files end up the same."""
    filled(model, tmp_path / "whole", shard_bytes=2 * 2000)
    asked = []
    cache = cached(model, tmp_path / "cut", shard_bytes=2 * 2000)
    reported = list(cache.fill(lambda: asked.append(1) or len(asked) > 3))
    assert reported == [(0, 5), (1, 5), (2, 5), (3, 5)]
    assert len(list((tmp_path / "cut").glob("hidden-*"))) == 1
    assert list(cached(model, tmp_path / "cut", shard_bytes=2 * 2000).fill()) == [(2, 5), (3, 5), (4, 5), (5, 5)]
    torn = tmp_path / "cut" / "hidden-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-3])
    runs, real = [], model.trunk.forward
    monkeypatch.setattr(model.trunk, "forward", lambda *args, **more: runs.append(1) or real(*args, **more))
    assert [done for done, _ in cached(model, tmp_path / "cut", shard_bytes=2 * 2000).fill()] == [3, 4, 5]
    assert len(runs) == 2
    shutil.copy(tmp_path / "cut" / "hidden-00000.safetensors", torn)  # sound, but of other batches
    assert [done for done, _ in cached(model, tmp_path / "cut", shard_bytes=2 * 2000).fill()] == [3, 4, 5]
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes()


def test_another_trunk_is_refused(tmp_path):
    """Catches a head that is trained on states of weights that have changed since."""
    model = build("glm4_moe")
    filled(model, tmp_path)
    with torch.no_grad():
        for weight in model.trunk.model.parameters():
            weight.mul_(1.001)
    with pytest.raises(ConfigError, match="holds the hidden states of another trunk"):
        cached(model, tmp_path)


def test_other_text_or_batches_are_refused(model, tmp_path):
    filled(model, tmp_path)
    with pytest.raises(ConfigError, match="of another text; remove the folder"):
        cached(model, tmp_path, batches=dealt(model, corpus(1)))
    with pytest.raises(ConfigError, match="of another text"):
        cached(model, tmp_path, batches=dealt(model, corpus(masked=False)))
    with pytest.raises(ConfigError, match=r"was made with seed = 3 \(now 4\); use the same"):
        cached(model, tmp_path, batches=dealt(model, seed=4))
    with pytest.raises(ConfigError, match=r"batches = 5 \(now 6\)"):
        cached(model, tmp_path, 6)
    with pytest.raises(ConfigError, match=r"dtype = BF16 \(now F32\)"):
        cached(model, tmp_path, dtype=None)
    assert cached(model, tmp_path).batch(0)


def test_the_limit_and_the_disk(model, tmp_path, monkeypatch):
    """Told before anything is made; nothing is written."""
    cache = cached(model, tmp_path / "a", limit_gb=1e-6)
    with pytest.raises(ConfigError, match=r"take 8\.76e-06 GB, the limit is 1e-06 GB; store fewer or shorter"):
        next(cache.fill())
    assert not (tmp_path / "a").exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(ConfigError, match=r"8\.76e-06 GB of them still missing, and the disk has 5e-06 GB left"):
        next(cached(model, tmp_path / "b").fill())
    assert list((tmp_path / "b").iterdir()) == []


def test_what_is_there_needs_no_room(model, tmp_path, monkeypatch):
    """Catches a full cache that cannot be opened again as the disk is now full of it."""
    filled(model, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    assert list(cached(model, tmp_path).fill()) == [(5, 5)]


def test_not_filled_or_damaged(model, tmp_path):
    cache = cached(model, tmp_path)
    with pytest.raises(ConfigError, match=r"hidden-0000\d\.safetensors does not exist: fill the cache"):
        cache.batch(0)
    filled(model, tmp_path)
    for path in tmp_path.glob("hidden-*"):
        path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"cannot be read: .* fill the cache again"):
        cached(model, tmp_path).batch(0)
    (tmp_path / KEY).write_text("{")
    with pytest.raises(CheckpointError, match="not a readable key"):
        cached(model, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num": 0}, "num_batches=0"), ({"limit_gb": 0}, "limit_gb=0"), ({"dtype": torch.int8}, "int8")],
)
def test_settings_without_a_meaning(options, words, model, tmp_path):
    with pytest.raises(ConfigError, match=words):
        cached(model, tmp_path, **options)


def test_fingerprints_of_other_weights_differ():
    """Catches a change of any one tensor, of a dtype or of a name, and a hash that differs from call to call."""
    model = build("glm4_moe").trunk.model
    seen = {fingerprint(model)}
    assert fingerprint(build("glm4_moe").trunk.model) in seen
    for value in model.state_dict().values():
        value.view(-1)[0] += 1
        assert fingerprint(model) not in seen
        seen.add(fingerprint(model))
    assert fingerprint(model.bfloat16()) not in seen


def test_the_key_can_be_read(model, tmp_path):
    filled(model, tmp_path)
    key = json.loads((tmp_path / KEY).read_text())
    assert (key["batch_size"], key["length"], key["dtype"], key["stage"]) == (2, 12, "BF16", "post")
