"""Rooms: lent and taken back, grown, rows that move to the front; kinds of layers that have none."""

import gc

import pytest
import torch

from nextn.fast.still import Room, Rooms, StillLayer, Window, padded
from nextn.fast.tape import Unrecordable
from nextn.kinds import Kind

CPU = torch.device("cpu")
KINDS = [Kind(), Kind("sliding_attention", 4)]


def test_batches_are_padded_to_powers_of_two():
    assert [padded(batch) for batch in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]


@pytest.mark.parametrize(
    "kind",
    [Kind("linear_attention"), Kind("hybrid"), Kind("full_attention", rate=4), Kind("indexed_attention", pool=2)],
    ids=lambda kind: f"{kind.name} {kind.rate} {kind.pool}",
)
def test_what_keeps_something_else_has_no_room(kind):
    with pytest.raises(Unrecordable, match=f"layers of kind {kind.name}"):
        Room([Kind(), kind], 1, 64)


def write(room: Room, starts: list[int], values: torch.Tensor) -> torch.Tensor:
    """values [B, m] into the first layer behind starts -> the columns [B, capacity] that attention is given."""
    room.positions = torch.tensor(starts)[:, None] + torch.arange(values.shape[1])
    layer = room.layers[0]
    assert isinstance(layer, StillLayer)
    keys, _ = layer.update(values[:, None, :, None], values[:, None, :, None])
    return keys[:, 0, :, 0]


def test_rows_are_written_where_they_start():
    room = Room(KINDS, 4, 64)
    write(room, [0, 0, 0], torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]))
    found = write(room, [3, 1, 0], torch.tensor([[10.0, 11], [12, 13], [14, 15]]))
    assert found[:, :6].tolist() == [[1, 2, 3, 10, 11, 0], [4, 12, 13, 0, 0, 0], [14, 15, 9, 0, 0, 0]]
    assert found.shape == (3, 64)
    room.select(torch.tensor([2, 0]))
    assert write(room, [3, 5], torch.zeros(2, 1))[:, :5].tolist() == [[14, 15, 9, 0, 0], [1, 2, 3, 10, 11]]


def test_growing_keeps_what_stands_and_drops_what_was_captured():
    room = Room(KINDS, 2, 64)
    write(room, [0, 62], torch.tensor([[1.0, 2], [3, 4]]))
    room.captured["trunk", 2, 1] = "graph"
    room.reserve(64)
    assert room.captured
    room.reserve(65)
    assert (room.captured, room.columns) == ({}, 128)
    found = write(room, [2, 64], torch.tensor([[5.0], [6]]))
    assert found.shape == (2, 128)
    assert (found[0, :4].tolist(), found[1, 61:66].tolist()) == ([1, 2, 5, 0], [0, 3, 4, 6, 0])


def test_a_window_sees_what_stands_before_it():
    room = Room(KINDS, 2, 64)
    window = Window(room, torch.tensor([[3, 4], [0, 1]]))
    mask = window.mask(2)
    assert mask.shape == (2, 1, 2, 64)
    assert mask.sum(-1).squeeze(1).tolist() == [[4, 5], [1, 2]]
    assert window.mask(2, window=2).sum(-1).squeeze(1).tolist() == [[2, 2], [1, 2]]
    with pytest.raises(Unrecordable, match="how long the cache is"):
        window.get_seq_length()


def test_a_room_comes_back_with_its_cache():
    rooms = Rooms(KINDS, columns=64, device=CPU)
    first = rooms.lend(3)
    room, other = first.room, rooms.lend(2).room
    assert (room.rows, other.rows) == (4, 2)
    write(room, [0], torch.ones(1, 2))
    assert rooms.in_use == [first]  # nobody holds the second cache
    del first
    gc.collect()
    again = rooms.lend(4)
    assert again.room is room
    assert again.lengths == [0] * 4
    assert not write(room, [5], torch.zeros(1, 1)).any()


def test_a_larger_room_takes_the_place_of_small_ones():
    rooms = Rooms(KINDS, columns=64, device=CPU)
    held, small = rooms.lend(1), rooms.lend(2).room
    write(held.room, [0], torch.ones(1, 1))
    write(small, [0], torch.ones(1, 1))
    large = rooms.lend(5).room
    assert not small.layers[0].slabs
    assert held.room.layers[0].slabs
    assert rooms.lend(2).room is large


def test_only_the_last_ways_to_sample_stay():
    room = Room(KINDS, 1, 64)
    for name in ("one", "two", "three"):
        room.captured[("chain", name), 1] = room.captured[("chain", name), 1, 4] = name
    room.captured["trunk", 1, 1] = "trunk"
    room.forget("chain", 2)
    assert set(room.captured.values()) == {"two", "three", "trunk"}
