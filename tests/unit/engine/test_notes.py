"""Notes of several workers, summed, say to each what all of them wrote."""

import pytest
import torch

from instep.engine.step.notes import Notes


def test_what_each_worker_wrote_comes_back_under_its_name_summed():
    layout = Notes(stop=1, arrived=3, buffers=0)
    packed = []
    for rank in range(3):
        own = layout.blank()
        own["stop"] = [float(rank == 1)]
        own["arrived"][rank] = 10.0 + rank
        packed.append(layout.pack(own))
    assert layout.size == len(packed[0]) == 4
    assert layout.unpack(torch.stack(packed).sum(0)) == {
        "stop": [1.0],
        "arrived": [10.0, 11.0, 12.0],
        "buffers": [],
    }


def test_a_note_of_another_length_than_was_agreed_on_is_our_own_mistake():
    layout = Notes(stop=1, arrived=2)
    with pytest.raises(AssertionError):
        layout.pack({"stop": [1.0], "arrived": [1.0]})
