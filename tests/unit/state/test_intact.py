"""The newest intact checkpoint is found, with the reason why no newer one is used."""

from __future__ import annotations

import pytest
import torch

from instep.errors import CheckpointError
from instep.state.intact import check, discard_after, newest_intact
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot


@pytest.fixture
def folder(tmp_path):
    """Three checkpoints."""
    writer = CheckpointWriter(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        tensors = {"model": {"w": torch.full((100,), float(step))}, "optimizer": {}}
        writer.save(Snapshot(step=step, tensors=tensors, facts={}))
    writer.finish()
    writer.poll()
    return tmp_path


def flip_last_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_is_found_where_all_are_intact(folder):
    assert newest_intact(folder) == (folder / "step-00000003", [])


def test_one_flipped_bit_in_a_tensor_is_detected_though_every_size_is_right(folder):
    flip_last_bit(folder / "step-00000003" / "model.safetensors")
    found, (why,) = newest_intact(folder)
    assert found == folder / "step-00000002"
    assert f"{folder}/step-00000003/model.safetensors is damaged: its SHA-256" in why


def test_each_newer_one_has_its_sentence_newest_first(folder):
    (folder / "step-00000003" / "optimizer.safetensors").unlink()
    flip_last_bit(folder / "step-00000002" / "manifest.json")
    found, sentences = newest_intact(folder)
    assert found == folder / "step-00000001"
    assert len(sentences) == 2
    assert sentences[0] == f"{folder}/step-00000003/optimizer.safetensors is missing."
    assert f"{folder}/step-00000002/manifest.json" in sentences[1]


def test_none_is_found_where_none_is_intact_or_none_is_there(folder, tmp_path_factory):
    for step in (1, 2, 3):
        (folder / f"step-{step:08d}" / "manifest.json").write_bytes(b"")
    found, sentences = newest_intact(folder)
    assert found is None
    assert len(sentences) == 3
    assert newest_intact(folder / "nowhere") == (None, [])
    assert newest_intact(tmp_path_factory.mktemp("empty")) == (None, [])
    with pytest.raises(CheckpointError, match="cannot be listed"):
        newest_intact(folder / "step-00000001" / "manifest.json")


def test_a_file_under_the_name_of_a_checkpoint_is_passed_over(folder):
    (folder / "step-00000009").write_text("")
    found, (why,) = newest_intact(folder)
    assert found == folder / "step-00000003"
    assert why == f"{folder}/step-00000009 is no checkpoint: there is no such folder."


def test_a_manifest_that_was_checked_has_the_step(folder):
    assert check(folder / "step-00000002").step == 2


def test_checkpoints_of_later_steps_are_discarded_and_earlier_ones_stay(folder):
    discard_after(folder, 1)
    assert newest_intact(folder) == (folder / "step-00000001", [])
    discard_after(folder, 1)
    discard_after(folder, 0)
    assert newest_intact(folder) == (None, [])
    discard_after(folder / "nowhere", 0)
