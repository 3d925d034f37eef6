"""Loader processes come, are killed, are replaced, and go."""

import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
from collections import UserDict
from contextlib import closing, suppress

import psutil
import pytest
import torch
from datasets import KillsItself, Plain, load, same

from instep.comm.protocol.messages import Mark, Whereabouts
from instep.data.loader import Loader, Slice
from instep.data.reading import wire
from instep.data.reading.pool import Pool
from instep.data.reading.process import Slot
from instep.data.samples import last_read
from instep.errors import DataError

pytestmark = pytest.mark.process

SLICES = [Slice(0, first, first + 10) for first in range(0, 100, 10)]


def made(dataset, processes=2, **options):
    return closing(Loader(dataset, seed=5, shuffle=False, processes=processes, **options))


def starts(batches):
    return [inputs[0, 0].item() for inputs, _ in batches]


def test_no_process_descriptor_or_memory_outlives_close():
    before, children = set(os.listdir("/proc/self/fd")), psutil.Process().children()
    with made(Plain(), 3) as loader:
        pids = loader.pids
        assert len(set(pids)) == 3
        loaded = load(loader, SLICES)
        next(loaded)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert psutil.Process().children() == children  # those of other tests' fork server
    assert {*os.listdir("/proc/self/fd")} <= before  # other tests' may have been closed meanwhile


def test_a_killed_process_is_replaced_and_no_batch_changes():
    with made(Plain()) as loader:
        loaded = load(loader, SLICES)
        got = [next(loaded), next(loaded)]
        killed = loader.pids
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        got += list(loaded)
        assert set(loader.pids).isdisjoint(killed)
        assert starts(load(loader, SLICES)) == starts(got) == [float(i) for i in range(0, 100, 10)]
    assert not any(psutil.pid_exists(pid) for pid in killed)


@pytest.mark.tail
def test_any_number_of_kills_is_survived_as_long_as_slices_get_read():
    places = [Slice(0, first, first + 1) for first in range(40)]
    with made(Plain()) as loader:
        got, killed = [], set()
        for batch in load(loader, places):
            got.append(batch)
            pid = loader.pids[len(got) % 2]
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        assert starts(got) == [float(index) for index in range(40)]
    assert len(killed) >= 8  # a process answers at most two slices before its end is seen


@pytest.mark.grid(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_sample_at_which_three_processes_are_lost_is_an_error_that_names_it(tmp_path, processes):
    with made(KillsItself(tmp_path / "times", 3), processes) as loader:
        loaded = load(loader, SLICES)
        for _ in range(7):
            next(loaded)
        with pytest.raises(
            DataError,
            match=r"^a loader process \(pid \d+\) was killed by SIGKILL while it read sample 70 "
            r"\(img_70.png\)\. .*It happened 3 times at this sample\. .*unreadable = 'skip'\.$",
        ):
            next(loaded)
        pids = loader.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.grid(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_sample_at_which_three_processes_are_lost_is_left_out_where_such_are_to_be(
    tmp_path, processes
):
    dataset = KillsItself(tmp_path / "times", 3)
    with made(dataset, processes, unreadable="skip") as loader:
        for _ in range(2):  # it is not tried again, even if it could be read by now
            reads = list(loader.read(SLICES))
            left_out = [skipped for read in reads for skipped in read.skipped]
            assert [skipped.sample for skipped in left_out] == [70]
            assert "was killed by SIGKILL" in left_out[0].cause
            assert [read.size for read in reads] == [10] * 7 + [9] + [10] * 2
            there = torch.cat([read.batch[0] for read in reads])[:, 0].tolist()
            assert there == [float(index) for index in range(100) if index != 70]
    assert dataset.path.read_text() == "0"


def test_a_sample_that_kills_is_left_out_of_the_fingerprint_too():
    class Kills(Plain):
        def __getitem__(self, index):
            if index == 17:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with made(Kills(20), 1, unreadable="skip") as loader:
        assert {index for index, _ in loader.fingerprint().contents} == {*range(20)} - {17}
        (read,) = loader.read([Slice(0, 10, 20)])
        assert [skipped.sample for skipped in read.skipped] == [17]


def test_of_samples_that_are_read_in_one_call_the_one_that_kills_is_left_out():
    class Together(Plain):
        def __getitems__(self, indices):
            if 73 in indices or 75 in indices:
                os.kill(os.getpid(), signal.SIGKILL)
            return [self[index] for index in indices]

    with made(Together(), 1, unreadable="skip") as loader:
        skipped = [skipped.sample for read in loader.read(SLICES) for skipped in read.skipped]
    assert skipped == [73, 75]


def test_a_slice_on_which_processes_are_lost_outside_of_a_read_is_named(tmp_path):
    def collate(samples):
        if samples[0][0][0] == 70:
            os.kill(os.getpid(), signal.SIGKILL)
        return samples

    with made(Plain(), collate=collate) as loader:
        loaded = load(loader, SLICES)
        for _ in range(7):
            next(loaded)
        with pytest.raises(
            DataError,
            match=r"^5 loader processes in a row .* positions 70 to 79 of epoch 1; the last "
            r"\(pid \d+\) was killed by SIGKILL",
        ):
            next(loaded)


def test_one_that_gets_past_its_slice_at_last_begins_to_count_anew(tmp_path):
    with made(KillsItself(tmp_path / "times", 2)) as loader:
        for _ in range(2):
            assert starts(load(loader, SLICES)) == [float(i) for i in range(0, 100, 10)]
            (tmp_path / "times").write_text("2")


def test_a_sample_that_is_marked_later_is_left_out_by_processes_that_are_there(tmp_path):
    with made(Plain(), 2, unreadable="skip") as loader:
        pids = loader.pids
        assert not [read.skipped for read in loader.read(SLICES) if read.skipped]
        loader.mark([Mark(dataset="training", sample=33, cause="it killed a worker")])
        skipped = [skipped for read in loader.read(SLICES) for skipped in read.skipped]
        assert skipped == [(33, "it killed a worker")]
        assert loader.pids == pids


def test_a_loader_process_records_nothing_in_the_page_of_the_process_that_trains(tmp_path):
    pages = last_read.Pages(1)
    page = pages.free()
    last_read.use_page(page)
    last_read.set_step(7)
    try:
        dataset = KillsItself(tmp_path / "times", 3)
        with made(dataset, 1) as loader, pytest.raises(DataError, match="sample 70"):
            list(load(loader, SLICES))
        assert last_read.decode_page(page) == Whereabouts(step=7)
    finally:
        last_read.use_page(None)


CANNOT_FORK = """
import ctypes, os, resource, sys
sys.path.insert(0, sys.argv[1])
from datasets import Plain, load
from instep.data.loader import Loader, Slice
import numpy.random  # another user may not be able to import it
times = int(sys.argv[2])
if os.getuid() == 0:  # to whom no limit applies
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: else /dev/fd is root's
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
said = []

def limit(soft):
    for pid in (os.getpid(), *([loader._pool._template.pid] if loader else [])):
        resource.prlimit(pid, resource.RLIMIT_NPROC, (soft, hard))

def say(text):
    said.append(text)
    if len(said) == times:
        limit(hard)

loader = None
limit(0)
loader = Loader(Plain(), seed=5, shuffle=False, processes=1, say=say)
print(len(said), said[-1])
said.clear()
limit(0)
os.kill(loader.pids[0], 9)
print([batch[0][0, 0].item() for batch in load(loader, [Slice(0, 0, 2), Slice(0, 2, 4)])])
print(len(said), said[-1])
loader.close()
"""


def test_a_fork_that_fails_is_retried_and_reported():
    """The fork of the process that forks the others, and of a replacement."""
    command = [sys.executable, "-c", CANNOT_FORK, os.path.dirname(__file__), "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    why = (
        "a loader process could not be forked (Resource temporarily unavailable); "
        "retrying in 0.4 s."
    )
    assert done.stdout.splitlines() == [f"3 {why}", "[0.0, 2.0]", f"3 {why}"], done.stderr


@pytest.mark.slow  # it takes as long as a run waits for a process
def test_a_fork_that_fails_for_good_is_an_error_that_says_what_to_do():
    command = [sys.executable, "-c", CANNOT_FORK, os.path.dirname(__file__), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (
        "a loader process could not be forked: Resource temporarily unavailable, tried 8 times. "
        "Set data.loaders to 0 or to a smaller number."
    ) in done.stderr


class Leaves(Plain):
    def __getitem__(self, index):
        if index == 70:
            sys.exit(9)
        return super().__getitem__(index)


def test_a_dataset_that_exits_is_an_error_that_names_the_code():
    with made(Leaves()) as loader, pytest.raises(DataError, match="ended with code 9"):
        list(load(loader, SLICES))


def test_after_an_error_and_a_closed_generator_the_loader_still_works():
    with made(Plain()) as loader:
        for _ in range(3):
            loaded = load(loader, SLICES)
            next(loaded)
            loaded.close()
        one, other = load(loader, SLICES), load(loader, reversed(SLICES))
        pairs = list(zip(one, other, strict=True))
        assert starts(a for a, _ in pairs) == starts(b for _, b in pairs)[::-1]


def test_a_batch_that_grows_finds_room():
    class Growing(Plain):
        def __getitem__(self, index):
            return torch.full((1 + index * 1000,), index), index

    with made(Growing(), 1) as loader:
        sizes = [Slice(0, i, i + 1) for i in (1, 99, 0, 50, 99)]
        assert [b[0].sum().item() for b in load(loader, sizes)] == [
            i * (1 + i * 1000) for i in (1, 99, 0, 50, 99)
        ]


class Unknown(Plain):
    def __getitem__(self, index):
        return {1, index}


def test_what_cannot_travel_is_named_with_the_remedy():
    with pytest.raises(DataError, match=r"holds a builtins\.set.*data\.loaders = 0"):
        made(Unknown(), collate=lambda samples: samples)


@pytest.mark.parametrize(
    "batch",
    [
        None,
        (1, -2.5, True, "naïve", b"\x00", None, 2**63 - 1, float("inf")),
        {"a": [torch.arange(6).reshape(2, 3).t()], 7: (), "c": torch.tensor(3.0)},
        [torch.empty(0, 4), torch.tensor([True, False]), torch.tensor([1 + 2j])],
        torch.randn(3, 2).bfloat16()[:, 1],
    ],
)
def test_a_batch_survives_the_trip(batch):
    skeleton, tensors = wire.pack(batch)
    places, size = wire.layout(tensors)
    memory = mmap.mmap(-1, max(size, 1))
    wire.write(tensors, places, memory)
    back = wire.unpack(skeleton, wire.read(places, memory))
    assert same(back, batch)


class Named(UserDict):
    """Items that are attributes too, as those of `transformers.BatchEncoding` are."""

    def __init__(self, data=None, more=None):
        super().__init__(data)
        self.more = more

    def __getattr__(self, name):
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


def named(samples):
    return Named({"row": torch.stack(samples[0][:1]), "inner": Named({1: "text"})})


def test_a_dict_of_a_class_of_its_own_is_one_in_the_process_that_trains_too():
    with made(Plain(), collate=named) as loader:
        (batch,) = load(loader, SLICES[:1])
    assert type(batch) is type(batch.inner) is Named
    assert torch.is_tensor(batch.row)
    assert batch.inner.data == {1: "text"}
    assert vars(batch)["more"] is None


def test_what_hugging_face_collates_is_the_same_after_the_trip():
    encoding = pytest.importorskip("transformers").BatchEncoding
    batch = encoding({"input_ids": torch.arange(6).reshape(2, 3), "labels": torch.tensor([1, 0])})
    skeleton, tensors = wire.pack(batch)
    back = wire.unpack(skeleton, tensors)
    assert type(back) is encoding
    assert list(back) == ["input_ids", "labels"]
    assert torch.equal(back.input_ids, batch.input_ids)
    assert torch.equal(back.labels, batch.labels)


def local():
    class Inner(UserDict):
        pass

    return Inner()


@pytest.mark.parametrize("batch", [Named({}, more=object()), Named({2.5: 1}), local()])
def test_a_dict_that_has_more_to_it_than_its_items_is_refused(batch):
    with pytest.raises(DataError, match=r"holds more than its items.*data\.loaders = 0"):
        wire.pack(batch)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("subprocess", "Popen"),
        ("builtins", "dict"),
        ("builtins", "exec"),
        ("collections", "UserDict.fromkeys"),
        ("a_module_that_nobody_imports", "Named"),
    ],
)
def test_no_other_class_is_made_whatever_name_comes(module, name):
    with pytest.raises(DataError, match=rf"holds a {module}\.{name}.*not imported here"):
        wire.unpack(["UserDict", [module, name, [["a", ["plain", "b"]]]]], [])


@pytest.mark.tail
def test_children_end_with_a_parent_that_is_killed():
    script = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from datasets import Plain
from instep.data.loader import Loader
print(*Loader(Plain(), seed=1, shuffle=True, processes=2).pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script, os.path.dirname(__file__)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout=10)


def test_a_child_holds_no_connection_of_its_parent():
    class Sees(Plain):
        def __getitem__(self, index):
            return torch.tensor([stat.S_ISSOCK(os.fstat(end.fileno()).st_mode) for end in ends])

    ends = socket.socketpair()
    with ends[0], ends[1], made(Sees(), 2) as loader:
        assert not any(batch.any() for batch in load(loader, SLICES[:2]))
        ends[0].sendall(b"still here")
        assert ends[1].recv(10) == b"still here"


class Waits(Plain):
    def __getitem__(self, index):
        signal.sigtimedwait([], 0.02)
        return super().__getitem__(index)


def test_auto_reads_in_processes_what_mostly_waits():
    with made(Waits(), "auto") as loader:
        assert loader.mode == "processes"
        assert "of it computing" in loader.why
        assert len(loader.pids) == 2


class Told(Plain):
    """Returns its worker info."""

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        if info is None:
            return torch.tensor([-1, 0, 0, 0])
        own = info.dataset is self
        return torch.tensor([info.id, info.num_workers, own, info.seed == torch.initial_seed()])


@pytest.mark.parametrize("processes", [1, 3])
def test_a_dataset_sees_in_a_loader_process_what_it_sees_in_one_of_torchs(processes):
    with made(Told(), processes) as loader:
        rows = torch.cat(list(load(loader, (Slice(0, i, i + 1) for i in range(6)))))
    assert rows[:, 0].tolist() == [number % processes for number in range(1, 7)]
    assert rows[:, 1].unique().tolist() == [processes]
    assert rows[:, 2:].all()


def test_a_dataset_that_is_read_where_training_is_sees_no_loader_process():
    with made(Told(), 0) as loader:
        (batch,) = load(loader, [Slice(0, 0, 3)])
    assert batch[:, 0].unique().tolist() == [-1]


def test_the_users_worker_init_fn_is_called_in_each_process_also_in_a_replacement(tmp_path):
    class Initialised(Plain):
        def __getitem__(self, index):
            return torch.tensor([self.opened_by, os.getpid()])

    def begin(number):
        info = torch.utils.data.get_worker_info()
        info.dataset.opened_by = 10 + number

    with made(Initialised(), 2, worker_init=begin) as loader:
        for _ in range(2):
            rows = torch.cat(list(load(loader, (Slice(0, i, i + 1) for i in range(4)))))
            assert sorted(rows[:, 0].tolist()) == [10, 10, 11, 11]
            assert set(rows[:, 1].tolist()) == set(loader.pids)
            for pid in loader.pids:
                os.kill(pid, signal.SIGKILL)


def test_a_worker_init_fn_that_raises_is_named():
    def begin(number):
        raise ValueError("no such store")

    message = r"worker_init_fn\(0\) raised ValueError: no such store"
    with pytest.raises(DataError, match=message):
        made(Plain(), 2, worker_init=begin)


def test_a_loader_process_makes_no_file_in_shared_memory_for_a_batch():
    """As torch's `default_collate` does where it believes itself in a worker of torch's."""

    def shared(batch):
        return batch[0].is_shared() or batch[1].is_shared()

    with made(Plain(), 1) as loader:
        work = loader._pool._work
        loader._pool.close()
    pool = Pool(work._replace(read=lambda part: shared(work.read(part)[0])), 1)
    assert pool.take(pool.submit(SLICES[0])) is False
    pool.close()


def test_a_slot_has_room_for_batches_without_a_byte():
    slot = Slot()
    assert len(slot.room(0)) > 0
    slot.close()
