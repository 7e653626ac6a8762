"""One packed copy of each weight, identified by its address or by its values."""

import torch

from nextn.runtime.native.abi import load
from nextn.runtime.native.weight_packing import PackedWeights


def test_one_copy_of_what_is_the_same():
    weights = PackedWeights(load())
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    first = weights.pack([weight])
    assert weights.pack([weight]) is first
    assert weights.pack([weight.clone()]) is first, "made anew in another recording"
    wide = weights.pack([weight.double().float().to(torch.bfloat16)])
    assert wide.memory.data_ptr() != first.memory.data_ptr()


def test_weights_that_begin_alike_are_distinguished():
    """Also one at the address of an earlier one that is known by its values."""
    weights, runtime = PackedWeights(load()), load()
    weight = torch.ones(64, 32)
    weights.pack([weight])
    for value in (2.0, 3.0):
        other = weight.clone()
        other[-1, -1] = value
        assert weights.pack([other.clone()]).memory.equal(runtime.pack(other))
    passing = weight.clone()
    weights.pack([passing])
    passing[0, 20] = 5.0
    assert weights.pack([passing]).memory.equal(runtime.pack(passing))


def test_several_in_one_matrix():
    """Part by part, each filled up to whole blocks; distinguished by how they are merged."""
    weights, runtime = PackedWeights(load()), load()
    one, other = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.ones(96, 32)
    parted = weights.pack([one, other], 2, 32)
    whole = torch.cat([one[:32], other[:64], one[32:], other[64:], torch.zeros(32, 32)])
    assert parted.memory.equal(runtime.pack(whole))
    assert weights.pack([one.clone(), other.clone()], 2, 32) is parted
    beside = weights.pack([one, other], 1, 32)
    assert beside.memory.equal(runtime.pack(torch.cat([one, other])))
    assert weights.pack([other, one], 1, 32).memory.equal(runtime.pack(torch.cat([other, one])))
