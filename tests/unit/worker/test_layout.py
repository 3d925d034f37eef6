"""The layout of a run is found once, and a file of it that cannot be used is refused plainly."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from instep.errors import RunError
from instep.job.mesh import MeshSpec
from instep.parallel.layout import Example
from instep.worker.replica.layout import agreed_layout

MESH = MeshSpec(tensor=2)


def layout_in(folder, width=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    batch = torch.randn(6, 8), torch.randint(4, (6,))

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    example = Example(batch, 6, partial(loss, model), [], loss)
    return agreed_layout(folder, MESH, model, example)


@pytest.fixture
def file(tmp_path):
    """A layout that a process has found."""
    assert layout_in(tmp_path).plan.cuts.keys() == {"0", "2"}
    (file,) = tmp_path.iterdir()
    return file


def test_a_layout_is_found_once_and_taken_by_all(file):
    text = file.read_text()
    assert '"row"' in text
    file.write_text(text.replace('"row"', '"column_gather"'))
    assert layout_in(file.parent).plan.cuts["2"].style == "column_gather"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"plan": {"ranks": "two"}}', "\x00\xff" * 40])
def test_a_damaged_layout_is_refused_in_one_sentence(file, text):
    file.write_text(text)
    with pytest.raises(RunError) as refused:
        layout_in(file.parent)
    said = str(refused.value)
    assert said.startswith(f"{file} is damaged: it is not what was written there. ")
    assert said.endswith("or remove it, and the next start of the run finds another layout.")
    file.unlink()
    assert layout_in(file.parent).plan is not None


def test_a_layout_of_another_model_is_refused_by_a_module_that_is_not_there(file):
    file.write_text(file.read_text().replace('"2"', '"blocks.7"'))
    with pytest.raises(RunError, match=r"is of another model: there is no 'blocks\.7' in this one"):
        layout_in(file.parent)


def test_a_file_that_cannot_be_read_or_written_is_named_with_what_the_system_says(file):
    folder = file.parent
    file.unlink()
    file.mkdir()
    with pytest.raises(RunError, match=r"cannot be written or read: it is a directory and not"):
        layout_in(folder)
    with pytest.raises(RunError, match=r"cannot be written or read: No such file or directory\."):
        layout_in(folder / "gone")
    assert list(folder.iterdir()) == [file]
