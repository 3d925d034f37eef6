"""The cause of a failure, and the line of the user's own code that it came from."""

import linecache

import torch
from torch import nn

from instep.comm.protocol.messages import Refused
from instep.errors import DataError, PeerError, WorkerError, own_line
from instep.system.causes import as_error, failed, sentence

HERE = __file__


def caught(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


class Net(nn.Module):
    def forward(self, x):
        return nn.functional.linear(x, torch.ones(2, 3))  # the line to be named


def test_an_error_that_torch_raised_is_traced_to_the_users_deepest_line():
    where, line = own_line(caught(Net(), torch.ones(1, 7)))
    assert where.startswith(f"{HERE}:")
    assert where.endswith(" in forward")
    assert line == "return nn.functional.linear(x, torch.ones(2, 3))  # the line to be named"


def test_an_error_that_instep_raised_from_the_users_is_traced_to_the_users_line():
    def theirs():
        raise KeyError("label")  # theirs

    def ours():
        try:
            theirs()
        except KeyError as error:
            raise DataError("sample 3 cannot be read") from error

    code = compile("def run(call):\n    call()\n", "<nowhere>", "exec")
    names = {}
    exec(code, names)
    error = caught(names["run"], ours)
    assert "# theirs" in own_line(error.__cause__)[1]


def test_an_error_without_a_line_of_the_user_names_none():
    assert own_line(ValueError("never raised")) == ("", "")
    code = compile("1 / 0", "<nowhere>", "exec")
    assert own_line(caught(exec, code, {}))[0].startswith(f"{HERE}:")  # whoever ran it


def test_an_error_in_a_cell_of_a_notebook_is_traced_to_its_line(tmp_path, monkeypatch):
    """A cell's path names no file; the kernel gives its lines to `linecache`."""
    cell = str(tmp_path / "2428102076.py")
    text = "def recipe():\n    raise ValueError  # the cell's\n"
    lines = text.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, cell, (len(text), None, lines, cell))
    names = {}
    exec(compile(text, cell, "exec"), names)
    where, line = own_line(caught(names["recipe"]))
    assert where == f"{cell}:2 in recipe"
    assert line == "raise ValueError  # the cell's"


def test_a_sentence_is_one_line_and_not_endless():
    assert sentence(ValueError("two\n  lines")) == "ValueError: two lines"
    assert sentence(KeyError()) == "KeyError, without a text"
    long = sentence(ValueError("x" * 5000))
    assert len(long) < 700
    assert long.endswith("...")


def test_no_text_of_an_exception_steers_a_terminal_or_fills_it():
    text = "\x1b[2J\x00gone\r\n" + "x" * 30_000_000
    for error in (ValueError(text), DataError(f"sample 3 cannot be read: {text}"), KeyError(text)):
        word = failed(error, 3, "loading")
        assert len(word.cause) < 4100
        assert word.cause.replace("\n", "").isprintable()
        assert "gone" in word.cause
    assert sentence(ValueError(text)).isprintable()


def test_a_label_that_is_out_of_bounds_gets_a_hint():
    error = caught(nn.functional.cross_entropy, torch.ones(1, 3), torch.tensor([3]))
    assert "too few outputs for the classes" in sentence(error)
    assert "too few" not in sentence(ValueError("Target is something else"))


def test_memory_that_ran_out_gets_a_hint():
    assert "train.micro_batches" in sentence(RuntimeError("CUDA out of memory. Tried ..."))


def test_a_batch_normalisation_of_one_sample_gets_a_hint():
    error = caught(nn.BatchNorm1d(3), torch.ones(1, 3))
    assert "(with averaging, fewer sync.participants or local steps)" in sentence(error)


def test_who_is_not_wanted_any_more_is_no_cause_for_the_others():
    error = as_error(Refused(kind="Unwanted", text="another has its place.", exit_code=5))
    assert isinstance(error, PeerError)
    assert failed(error, 3, "").kind == "PeerError"


def test_the_last_word_has_the_class_and_exit_code_of_our_errors_only():
    ours = failed(DataError("no such column"), 3, "loading")
    assert (ours.kind, ours.cause, ours.exit_code) == ("DataError", "no such column", 4)
    theirs = failed(caught(Net(), torch.ones(1, 7)), 5, "forward")
    assert theirs.kind == "error"
    assert theirs.cause.startswith("RuntimeError: ")
    assert (theirs.step, theirs.phase, theirs.exit_code) == (5, "forward", WorkerError.exit_code)
    assert theirs.where
    assert theirs.line
