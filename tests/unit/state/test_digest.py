"""A digest detects every flipped bit; a memory watch detects unannounced writes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.state.digest import MemoryWatch, _column_sums, _column_sums_by_torch, combined, digests

LENGTHS = [1, 3, 511, 1024, 1025, 5000]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


def made(length, dtype=torch.float32):
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    return values.to(dtype) if dtype != torch.bool else values > 0


def flipped(tensor, *bits):
    """A copy with these bits the other way, counted from the tensor's first byte."""
    changed = tensor.clone()
    flat = changed.view(-1).view(torch.uint8)
    for bit in bits:
        flat[bit // 8] ^= 1 << bit % 8
    return changed


@given(length=st.sampled_from(LENGTHS), data=st.data())
def test_every_flipped_bit_changes_the_digest(length, data):
    tensor = made(length)
    bit = data.draw(st.integers(0, 32 * length - 1))
    assert digests([flipped(tensor, bit)]) != digests([tensor])


@given(length=st.sampled_from([600, 5000]), bit=st.integers(0, 63), data=st.data())
def test_the_same_bit_flipped_in_two_words_changes_it_too(length, bit, data):
    words = st.integers(0, length // 2 - 1)
    first = data.draw(words)
    second = data.draw(words.filter(lambda word: word % 512 != first % 512))
    tensor = made(length)
    assert digests([flipped(tensor, 64 * first + bit, 64 * second + bit)]) != digests([tensor])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("length", [0, *LENGTHS])
def test_equal_values_have_equal_digests_anywhere_in_memory(dtype, length):
    tensor = made(length, dtype) if length else torch.zeros(0, dtype=dtype)
    room = torch.zeros(length + 3, dtype=dtype)
    room[3:] = tensor
    spread = torch.zeros(length, 2, dtype=dtype)
    spread[:, 1] = tensor
    assert digests([tensor]) == digests([room[3:]]) == digests([spread[:, 1]])


def test_the_layout_in_memory_does_not_count():
    images = made(2 * 3 * 5 * 7).view(2, 3, 5, 7)
    assert digests([images]) == digests([images.to(memory_format=torch.channels_last)])


def test_the_digest_of_a_sparse_tensor_covers_its_rows_and_values():
    rows, values = torch.tensor([[0, 2]]), made(8).view(2, 4)
    pairs = [(rows, values), (rows.flip(1), values.flip(0))]
    pairs += [(rows, flipped(values, 70)), (rows + 1, values)]
    first, same, other, moved = (
        torch.sparse_coo_tensor(*pair, (5, 4), check_invariants=True) for pair in pairs
    )
    assert digests([first]) == digests([same])
    assert len({*digests([first, other, moved])}) == 3


def test_one_digest_of_several_depends_on_each_and_on_their_order():
    found = {combined(several) for several in ([1, 2], [2, 1], [1, 3], [1], [1, 2, 0], [])}
    assert len(found) == 6


def test_all_digests_fit_64_bits():
    assert all(0 <= each < 2**64 for each in digests([made(length) for length in LENGTHS]))


def test_what_other_devices_add_up_is_the_same():
    flat = made(4096).view(torch.uint8)
    assert np.array_equal(_column_sums_by_torch(flat, 4), _column_sums(flat, 4))


# ---- the watch


class Clock:
    """Every look at it takes as long as it is told."""

    def __init__(self):
        self.now, self.tick = 0.0, 0.0

    def __call__(self):
        self.now += self.tick
        return self.now


def watched(share=1e9, clock=None):
    model = nn.Sequential(nn.Linear(700, 500), nn.Conv2d(3, 5, 2), nn.Linear(3, 1))
    model[1].to(memory_format=torch.channels_last)
    model[2].requires_grad_(False)
    return model, MemoryWatch(model.named_parameters(), share, clock or Clock())


NAMES = [name for name, _ in watched()[0].named_parameters()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("element", [0, -1])
def test_a_memory_watch_names_the_tensor_with_a_flipped_bit(name, element):
    model, watch = watched()
    watch.record()
    assert watch.find_change() is None
    memory = model.get_parameter(name).data
    if memory.dim() == 4:
        memory = memory.permute(0, 2, 3, 1)  # as it lies there
    memory.view(-1).view(torch.int32)[element] ^= 1 << 20
    assert watch.find_change() == name


def test_what_is_written_before_the_next_record_is_no_change():
    model, watch = watched()
    watch.record()
    with torch.no_grad():
        model[0].weight.add_(1)
    watch.record()
    assert watch.find_change() is None


def test_a_tensor_with_new_memory_is_no_change():
    model, watch = watched()
    watch.record()
    model[0].weight.data = model[0].weight.data + 1
    assert watch.find_change() is None
    watch.record()
    model[0].weight.data[0, 0] += 1
    assert watch.find_change() == "0.weight"


def test_a_memory_watch_that_costs_too_much_checks_less_each_time_in_rotation():
    clock = Clock()
    _, watch = watched(share=0.01, clock=clock)
    pieces = set()
    for step in range(40):
        clock.tick = 1.0
        watch.record()
        assert watch.find_change() is None
        clock.tick = 0.0
        clock.now += 100.0
        if step > 10:
            assert watch.covered < 1
            pieces |= {piece.name for piece in watch._window}
    assert pieces == set(NAMES)


def test_a_model_without_parameters_is_watched_without_harm():
    watch = MemoryWatch([], 0.01)
    watch.record()
    watch.record()
    assert watch.find_change() is None
    assert watch.covered == 0
