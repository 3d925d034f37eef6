"""Streams in whole runs, against a plain loop over the same iterators."""

import itertools
import socketserver
import threading
from contextlib import suppress

import numpy as np
import pytest
import streams
import torch
from safetensors.torch import load_file
from started import RECIPES
from torch import nn
from torch.utils.data._utils import worker as torch_worker

import instep
from instep.data.reading.streams.turns import StreamPlan, Turns
from instep.data.samples.contents import content_of
from instep.errors import WorkerError
from instep.events import CONTENTS, read_records
from instep.lab.contents import compare
from instep.store.run_folder import RunFolder
from marks import tail

pytestmark = pytest.mark.process

PARTS, WINDOW, BATCH, SEED, COUNT = 4, 32, 12, 5, 250


def trained(folder, workers, *, kind="told", train=None, data=None, **more):
    return instep.train(
        f"{RECIPES / 'streams.py'}:recipe",
        name=f"on-{workers}",
        runs=folder,
        workers=workers,
        seed=SEED,
        quiet=True,
        arguments={"kind": kind, "count": COUNT},
        check={"content": "all"},
        train={
            "global_batch": BATCH,
            "micro_batches": 4,
            "determinism": "bits",
            **(train or {"epochs": 2}),
        },
        data={"order": "windowed", "window": WINDOW * PARTS, "parts": PARTS, **(data or {})},
        **more,
    )


def parts_alone():
    """What each iterator gives, in a plain loop."""
    found = []
    for part in range(PARTS):
        data = streams.Numbers(COUNT)
        torch_worker._worker_info = torch_worker.WorkerInfo(part, PARTS, 0, data)
        found.append(list(data))
        torch_worker._worker_info = None
    return found


def planned(steps=None):
    """(epoch, part, place in the part) of the samples of each step."""
    sizes = tuple(map(len, parts_alone()))
    samples = sum(sizes) if steps is None else steps * BATCH
    order = Turns(
        StreamPlan(PARTS, WINDOW, True, sizes if steps is None else None, samples), SEED, BATCH
    )
    for epoch in range(2 if steps is None else 1):
        for first in range(0, samples, BATCH):
            numbers = order.indices(epoch, first, min(first + BATCH, samples))
            yield [order.plan.place(number) for number in numbers.tolist()]


def plain(steps=None):
    """One process, whole batches."""
    rows, net = parts_alone(), streams.model()
    optimizer = streams.optimizer(net.parameters())
    for places in planned(steps):
        chosen = [rows[part][at % len(rows[part])] for part, _, at in places]
        inputs, targets = map(torch.stack, zip(*chosen, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    return net.state_dict()


def assert_same(run, wanted):
    for name, tensor in load_file(run.path / "model.safetensors").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-9)


def assert_each_once(run, steps=None):
    """By content: each planned sample was given to training, and no other."""
    files = run.path.glob("contents-*.bin")
    rows = np.unique(np.concatenate([read_records(file, CONTENTS) for file in files]))
    alone = parts_alone()
    wanted = [
        (epoch, content_of(alone[part][at % len(alone[part])]))
        for places in planned(steps)
        for part, epoch, at in places
    ]
    assert sorted(zip(rows["epoch"].tolist(), rows["content"].tolist(), strict=True)) == sorted(
        wanted
    )
    assert run.summary["repeated_samples"] == run.summary["missing_samples"] == 0
    proof = compare(RunFolder(run.path))
    assert proof.exact
    assert proof.due == proof.recorded == len(wanted)


def test_a_stream_that_ends_gives_the_same_at_any_number_of_workers(tmp_path):
    one, two = trained(tmp_path, 1, data={"loaders": 0}), trained(tmp_path, 2)
    assert_same(one, plain())
    assert_each_once(two)
    assert one.summary["parameters_sha256"] == two.summary["parameters_sha256"]
    assert two.summary["same_as_one_machine"] == "yes"


@pytest.mark.parametrize("kind", ["numbers", tail("told")])
def test_a_stream_is_continued_at_another_size(tmp_path, kind):
    steps = 30  # each part begins again
    trained(tmp_path, 2, kind=kind, train={"steps": steps, "stop_after_steps": 17})
    run = instep.resume(tmp_path / "on-2", workers=3, quiet=True)
    assert_same(run, plain(steps))
    assert_each_once(run, steps)


MIXED = [{"name": "large", "weight": 2}, {"name": "small", "weight": 1}]


@pytest.mark.parametrize("kind", ["told", tail("numbers")])
def test_mixed_streams_are_continued_at_another_size(tmp_path, kind):
    def run(name, workers, **train):
        return instep.train(
            f"{RECIPES / 'streams.py'}:mixed",
            name=name,
            runs=tmp_path,
            workers=workers,
            seed=SEED,
            quiet=True,
            arguments={"kind": kind, "count": COUNT},
            check={"content": "all"},
            train={
                "global_batch": BATCH,
                "micro_batches": 4,
                "determinism": "bits",
                "epochs": 2,
                **train,
            },
            data={"sources": MIXED, "parts": 2, "window": 4 * WINDOW},
        )

    one = run("one", 1)
    run("two", 2, stop_after_steps=31)  # in epoch 2
    two = instep.resume(tmp_path / "two", workers=3, quiet=True)
    assert one.summary["parameters_sha256"] == two.summary["parameters_sha256"]
    planned = {"large": 200, "small": 100}
    assert two.summary["classes"]["planned"] == planned
    alone = [content_of(streams.sample(number)) for number in range(COUNT + 50)]
    for each in (one, two):
        proof = compare(RunFolder(each.path))
        assert proof.exact
        assert proof.due == proof.recorded == 600
        files = each.path.glob("contents-*.bin")
        rows = np.unique(np.concatenate([read_records(file, CONTENTS) for file in files]))
        for epoch in range(2):
            found = rows["content"][rows["epoch"] == epoch].tolist()
            times = [found.count(content) for content in alone]
            assert sum(times[:COUNT]) == planned["large"]
            assert set(times[COUNT:]) == {2}


class Source(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Gives each number once, to whoever asks first."""

    daemon_threads = True

    def __init__(self, address):
        super().__init__(str(address), Answers)
        self.numbers = itertools.count()


class Answers(socketserver.BaseRequestHandler):
    def handle(self):
        with suppress(OSError):
            while self.request.recv(1):
                self.request.sendall(next(self.server.numbers).to_bytes(8, "little"))


def test_what_a_socket_gives_is_used_once_though_its_readers_are_killed(tmp_path):
    steps, window = 60, 4
    with Source(tmp_path / "source") as source:
        threading.Thread(target=source.serve_forever, daemon=True).start()
        try:
            instep.train(
                f"{RECIPES / 'streams.py'}:asked",
                name="on-2",
                runs=tmp_path,
                workers=2,
                seed=SEED,
                quiet=True,
                arguments={"address": str(tmp_path / "source")},
                check={"content": "all"},
                train={
                    "global_batch": BATCH,
                    "micro_batches": 4,
                    "steps": steps,
                    "stop_after_steps": steps - 10,
                },
                data={"once": True, "parts": 4, "order": "windowed", "window": window * 4},
            )
            run = instep.resume(tmp_path / "on-2", workers=3, quiet=True)
            given = next(source.numbers)
        finally:
            source.shutdown()
    assert (tmp_path / "second").exists()
    assert run.summary["steps"] == steps
    assert run.summary["repeated_samples"] == run.summary["missing_samples"] == 0
    files = run.path.glob("contents-*.bin")
    rows = np.unique(np.concatenate([read_records(file, CONTENTS) for file in files]))
    # a step that was computed again had the samples that were kept
    assert len(np.unique(rows["index"])) == len(rows) >= steps * BATCH
    numbers = {content_of(streams.sample(number)): number for number in range(given)}
    used = [numbers[content] for content in rows["content"].tolist()]
    assert len({*used}) == len(used)
    assert run.summary["stream"]["once"]


def test_a_stream_that_does_not_divide_itself_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(WorkerError, match="your dataset does not divide itself"):
        trained(tmp_path, 2, kind="undivided")
