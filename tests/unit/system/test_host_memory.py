"""Memory that outlives a process: what is stamped is whole, whatever a kill interrupts."""

import mmap
import os
import random
import resource
import signal
import struct
import zlib
from pathlib import Path
from secrets import token_hex

import pytest
import torch

from instep.errors import CheckpointError, WorkerError
from instep.system import host_memory
from instep.system.host_memory import REGION, HostMemory, NoRoom, Stamp
from instep.system.memory_files import OWNER, MemoryFiles
from instep.system.processes import name_process
from instep.system.slots import TensorSpec

SECRET = token_hex()
"""Of no other run of these tests, which may be under way at the same time."""

LAYOUT = {
    "residual": TensorSpec((5, 7), torch.float32),
    "nothing": TensorSpec((0, 3), torch.float32),
    "step": TensorSpec((), torch.int64),
    "levels": TensorSpec((3,), torch.int8),
    "half": TensorSpec((9,), torch.bfloat16),
}


def keep(memory, course, number, value=None, generation=0):
    for tensor in memory.stage(course, number, generation).values():
        tensor.fill_(number if value is None else value)
    memory.staged(course, number, generation)


def value_at(memory, *commit):
    """The one value that all tensors of a commit hold; None if it is not held."""
    tensors = memory.at(*commit)
    if tensors is None:
        return None
    values = {float(each) for tensor in tensors.values() for each in tensor.flatten().unique()}
    assert len(values) == 1
    return values.pop()


def owned(file, number, pid):
    """A process has the file of a worker from now on."""
    os.pwrite(file, struct.pack("<QQ", number + 1, pid), OWNER.start)


@pytest.fixture
def file():
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def another(file, layout=LAYOUT):
    """The memory as the next process finds it."""
    memory = HostMemory(os.dup(file))
    memory.lay_out(layout)
    return memory


def test_the_next_process_finds_the_last_two_commits_and_no_other(file):
    memory = another(file)
    for number in (1, 2, 3):
        keep(memory, 1, number)
    found = HostMemory(os.dup(file))  # that knows no layout
    assert found.outlives
    assert found.stamps() == [Stamp(1, 3, 0), Stamp(1, 2, 0)]
    assert [value_at(found, 1, number) for number in (1, 2, 3, 4)] == [None, 2, 3, None]
    assert value_at(found, 2, 3) is None
    tensors = found.at(1, 3, layout=LAYOUT)
    assert {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()} == LAYOUT
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())
    tensors["residual"].fill_(9)
    assert bool((memory.at(1, 3)["residual"] == 9).all())  # one memory, no copies


def test_a_commit_that_is_staged_again_does_not_cost_the_one_before(file):
    memory = another(file)
    keep(memory, 1, 7)
    keep(memory, 1, 8)  # and abandoned
    assert value_at(memory, 1, 8) == 8
    memory.stage(1, 8, 0)
    assert [value_at(memory, 1, 7), value_at(memory, 1, 8)] == [7, None]
    memory = another(file)  # killed there
    keep(memory, 1, 8, value=80, generation=5)
    assert [value_at(memory, 1, 7), value_at(memory, 1, 8, 5)] == [7, 80]
    assert value_at(memory, 1, 8) is None  # that of the attempt which was abandoned
    keep(memory, 1, 9)
    assert [value_at(memory, 1, 8, 5), value_at(memory, 1, 9)] == [80, 9]


def test_a_run_that_goes_back_opens_a_course_and_keeps_its_first_commit(file):
    memory = another(file)
    keep(memory, 1, 7)
    keep(memory, 1, 8)
    keep(memory, 2, 5)  # the checkpoint
    keep(memory, 2, 6)
    assert memory.stamps() == [Stamp(2, 6, 0), Stamp(2, 5, 0)]
    assert [value_at(memory, 2, 5), value_at(memory, 2, 6)] == [5, 6]


def test_another_layout_leaves_what_is_stamped_until_it_is_staged_over(file):
    larger = {"residual": TensorSpec((50_000,), torch.float32)}
    memory = another(file)
    keep(memory, 1, 1)
    memory = another(file, larger)
    keep(memory, 1, 2)
    memory = another(file, larger)
    assert value_at(memory, 1, 1) == 1
    assert memory.at(1, 1).keys() == LAYOUT.keys()
    assert memory.at(1, 2, layout=larger)["residual"].shape == (50_000,)
    with pytest.raises(CheckpointError, match=r"'residual' as float32 \[5, 7\].*float32 \[50000\]"):
        memory.at(1, 1, layout=larger)
    keep(memory, 1, 3)
    assert [value_at(memory, 1, number) for number in (1, 2, 3)] == [None, 2, 3]


@pytest.mark.parametrize("written", range(36))
def test_half_a_stamp_is_none(file, written):
    memory = another(file)
    keep(memory, 1, 6)
    keep(memory, 1, 7)
    for old in (bytes(36), os.pread(file, 36, 64), b"\xff" * 36):
        head = struct.pack("<QQQq", 3, (8 << 40) + 8, 1, -5)
        new = head + struct.pack("<I", zlib.crc32(head))
        os.pwrite(file, new[:written] + old[written:], 64)
        found = HostMemory(os.dup(file))
        whole = [Stamp(1, 7, 0)] if old[:1] == b"\x01" and new[:written] == old[:written] else []
        assert found.stamps() == [*whole, Stamp(1, 6, 0)]
    os.pwrite(file, new, 64)
    assert found.stamps()[0] == Stamp(3, (8 << 40) + 8, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.ftruncate(file, mmap.PAGESIZE),
        lambda file: os.ftruncate(file, REGION + 100),
        lambda file: os.pwrite(file, bytes(300), REGION),
        lambda file: os.pwrite(file, struct.pack("<Q", 1 << 60), REGION),
        lambda file: os.pwrite(file, b"\xff" * 40, REGION + 8),
        lambda file: os.pwrite(file, b'[[1,"no such type",[2]]]', REGION + 8),
    ],
)
def test_a_slot_whose_layout_was_damaged_holds_nothing(file, damage):
    memory = another(file)
    keep(memory, 1, 6)
    damage(file)
    found = HostMemory(os.dup(file))
    assert found.stamps() == [Stamp(1, 6, 0)]
    assert found.at(1, 6) is None
    keep(another(file), 1, 7)
    assert value_at(HostMemory(os.dup(file)), 1, 7) == 7


def test_a_limit_on_the_size_of_files_is_named(file):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    try:
        with pytest.raises(WorkerError, match="set ulimit -f to unlimited"):
            another(file).lay_out(LAYOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_the_machine_has_not_is_refused_in_one_sentence(file):
    memory = another(file)
    keep(memory, 1, 1)
    before = os.fstat(file).st_blocks
    with pytest.raises(WorkerError, match=r"of memory for the state .* cannot be had: .* are free"):
        memory.lay_out({"residual": TensorSpec((1 << 38,), torch.float32)})
    assert os.fstat(file).st_blocks == before
    assert value_at(memory, 1, 1) == 1


def test_without_a_fork_server_the_memory_ends_with_its_process():
    before = mappings_alone()
    memory = HostMemory()
    assert not memory.outlives
    memory.lay_out(LAYOUT)
    keep(memory, 1, 1)
    used = memory.at(1, 1)
    (inode,) = mappings_alone() - before
    memory.close()
    assert bool((used["residual"] == 1).all())
    assert inode in mappings_alone()
    del used
    assert inode not in mappings_alone()


def mappings_alone():
    """The inodes of the memory files without a fork server that this process maps.

    Other tests of this process may have left some that the garbage collector has not taken yet.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:instep-alone" in line}


def test_what_was_cleared_is_not_found_and_its_pages_go_back_to_the_system():
    memory_files = MemoryFiles(2, SECRET)
    file = memory_files.of(7)
    owned(file, 7, 77)
    memory = another(file)
    keep(memory, 1, 1)
    memory_files.ended(7, 77)
    assert HostMemory(os.dup(memory_files.of(7))).stamps() == [Stamp(1, 1, 0)]
    owned(file, 7, 77)
    memory.clear()
    assert HostMemory(os.dup(file)).stamps() == []
    memory_files.ended(7, 77)
    assert os.fstat(file).st_blocks == 0
    memory_files.keep_only(0, -1)


def test_limits_of_the_process_count_as_those_of_the_machine(file):
    memory = another(file)
    child = os.fork()
    if not child:
        used = int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)
        try:
            memory.lay_out({"residual": TensorSpec((20_000_000,), torch.float32)})
        except NoRoom as error:
            os._exit(0 if error.needed > 160_000_000 > 100_000_000 >= error.left else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_that_others_take_meanwhile_is_not_taken_to_the_end(file, monkeypatch):
    monkeypatch.setattr(host_memory, "_SPARE", 1 << 60)
    memory = HostMemory(os.dup(file), part=1)
    with pytest.raises(NoRoom):
        memory.lay_out({"residual": TensorSpec((10_000_000,), torch.float32)})
    assert 512 * os.fstat(file).st_blocks < 10_000_000


def test_a_part_that_is_dropped_gives_back_its_memory_and_leaves_the_other_one(file):
    first = another(file)
    keep(first, 1, 1)
    before = os.fstat(file).st_blocks
    memory = HostMemory(os.dup(file), part=1)
    memory.lay_out({"residual": TensorSpec((1_000_000,), torch.float32)})
    keep(memory, 1, 1)
    assert os.fstat(file).st_blocks > before + 15_000
    memory.drop()
    assert os.fstat(file).st_blocks <= before
    assert value_at(HostMemory(os.dup(file)), 1, 1) == 1
    again = HostMemory(os.dup(file), part=1)
    assert again.stamps() == []
    again.lay_out(LAYOUT)
    keep(again, 1, 2)
    assert value_at(HostMemory(os.dup(file), part=1), 1, 2) == 2


def test_a_commit_that_is_forgotten_is_not_found_and_its_slot_is_the_next_to_be_staged(file):
    memory = HostMemory(os.dup(file))
    memory.lay_out({"a": ((2,), torch.float32)})
    for number, generation in ((1, 1), (2, 1)):  # the second is abandoned
        memory.stage(0, number, generation)["a"].fill_(number)
        memory.staged(0, number, generation)
    memory.forget(0, 2, 1)
    assert memory.stamps() == [(0, 1, 1)]
    memory.stage(0, 2, 2)["a"].fill_(3)
    memory.staged(0, 2, 2)
    kept = memory.at(0, 1, 1)
    assert kept is not None
    assert kept["a"].tolist() == [1, 1]


def test_each_number_has_a_file_of_its_own_while_there_are_any():
    memory_files = MemoryFiles(2, SECRET)
    first, second = memory_files.of(40), memory_files.of(3)
    assert len({first, second}) == 2
    assert [memory_files.of(40), memory_files.of(3), memory_files.of(5)] == [first, second, -1]
    owned(first, 40, 77)
    memory_files.ended(40, 77)  # it left nothing
    assert memory_files.of(5) == first
    memory_files.keep_only(0, -1)


# ---- killed in the midst of it


class Progress:
    """Two words that a child writes and its parent reads: course and number of its last commit."""

    def __init__(self):
        self.words = memoryview(mmap.mmap(-1, 16)).cast("q")


def layout_of(course):
    """Another one with each course, smaller and larger."""
    count = (1_000, 40_000, 7_001)[course % 3]
    return {"a": TensorSpec((count,), torch.int64), "b": TensorSpec((count // 7,), torch.int16)}


def pattern(course, number):
    for name, (shape, dtype) in layout_of(course).items():
        values = torch.arange(shape[0]) * 31 + 1_000_003 * course + 7 * number
        yield name, values.to(dtype)


def stage_until_killed(file, progress, course, number):
    memory = HostMemory(os.dup(file))
    memory.lay_out(layout_of(course))
    base = dict(pattern(course, 0))
    while True:
        number += 1
        for name, tensor in memory.stage(course, number, 0).items():
            torch.add(base[name], torch.tensor(7 * number).to(tensor.dtype), out=tensor)
        memory.staged(course, number, 0)
        progress.words[0], progress.words[1] = course, number


@pytest.mark.process
@pytest.mark.parametrize("kills", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_the_last_commit_whole(file, kills):
    draw, progress, after = random.Random(7), Progress(), 0
    halves = 0
    for course in range(1, kills + 1):
        before = tuple(progress.words)
        pid = os.fork()
        if not pid:
            stage_until_killed(file, progress, course, before[1])
        commits = draw.choice((0, 0, 1, 2, 9))  # so many at least
        while commits and (progress.words[0], progress.words[1]) < (course, before[1] + commits):
            pass
        for _ in range(draw.randrange(50_000)):
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        committed = progress.words[0], progress.words[1]
        memory = HostMemory(os.dup(file))
        stamps = [stamp[:2] for stamp in memory.stamps()]
        if committed != (0, 0):
            assert committed in stamps
        for stamp in stamps:
            assert stamp <= max((committed[0], committed[1] + 1), (course, before[1] + 1))
            found = memory.at(*stamp)
            for name, values in pattern(*stamp):
                assert torch.equal(found[name], values), (course, stamp, name)
        newest = stamps[0] if stamps else None
        after += newest is not None and newest > committed
        halves += len(stamps) == 1 and course > 2
        memory.close()
    print(f"{kills} kills, {halves} with a slot half written, {after} right after a stamp")
    assert halves


def test_a_process_that_ended_takes_no_memory_from_the_one_that_has_its_file_by_now():
    """A new fork server starts workers in the places of dead ones before it sees those end."""
    memory_files = MemoryFiles(4, SECRET)
    files = [memory_files.of(number) for number in (1, 0)]
    for pid, (number, file) in enumerate(zip((1, 0), files, strict=True), 1001):
        owned(file, number, pid)
        memory_files.ended(number, 7)  # the one before, which left nothing
        keep(another(file), 1, 1)
    assert memory_files.of(2) not in files
    assert [memory_files.of(number) for number in (1, 0)] == files
    memory_files.keep_only(0, -1)


def test_a_file_is_given_to_nobody_while_its_process_may_write():
    memory_files = MemoryFiles(2, SECRET)
    owned(memory_files.of(3), 3, os.getpid())
    assert memory_files.of(3) == -1
    memory_files.keep_only(0, -1)


@pytest.mark.parametrize("before", ["stage", "staged"])
def test_a_process_whose_file_belongs_to_another_by_now_writes_nothing_that_counts(file, before):
    owned(file, 0, 1001)
    memory = another(file)
    keep(memory, 1, 1)
    if before == "staged":
        memory.stage(1, 2, 0)
    owned(file, 0, 1002)
    with pytest.raises(WorkerError, match="belongs to another process"):
        keep(memory, 1, 2)
    assert another(file).stamps() == [Stamp(1, 1, 0)]


@pytest.mark.parametrize("size", [100, 3_000_001], ids=["small", "large"])
def test_tensors_that_another_process_has_written_are_not_taken_up(file, size):
    memory = another(file, {"first": TensorSpec((size,), torch.float32), **LAYOUT})
    keep(memory, 1, 1)
    keep(memory, 1, 2)
    assert value_at(HostMemory(os.dup(file)), 1, 2) == 2
    memory.at(1, 2)["first"].fill_(3)
    found = HostMemory(os.dup(file))
    assert found.at(1, 2) is None
    assert value_at(found, 1, 1) == 1


@pytest.mark.parametrize("size", [3, 100, 5_000, 1_000_001])
def test_tensors_that_changed_places_are_not_taken_up(file, size):
    layout = {name: TensorSpec((size,), torch.float32) for name in ("first", "second")}
    memory = another(file, layout)
    tensors = memory.stage(1, 1, 0)
    for tensor in tensors.values():
        tensor.normal_()
    memory.staged(1, 1, 0)
    assert HostMemory(os.dup(file)).at(1, 1) is not None
    kept = tensors["first"].clone()
    tensors["first"].copy_(tensors["second"])
    tensors["second"].copy_(kept)
    assert HostMemory(os.dup(file)).at(1, 1) is None


def test_a_new_fork_server_has_the_memory_of_workers_that_die_while_it_starts():
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        name_process("instep-worker")
        memory_files = MemoryFiles(2, SECRET)
        file = memory_files.of(7)
        memory_files.keep_only(7, file)
        keep(another(file), 1, 1)
        os.write(writes, b"1")
        signal.pause()
    os.read(reads, 1)
    memory_files = MemoryFiles(2, SECRET)
    memory_files.adopt_all()
    memory_files.adopt(7, child)  # as the master says later
    assert memory_files.of(7) == -1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    memory_files.ended(7, child)
    assert value_at(HostMemory(os.dup(memory_files.of(7))), 1, 1) == 1
    assert HostMemory(os.dup(memory_files.of(8))).stamps() == []
    memory_files.keep_only(0, -1)
    os.close(reads)
    os.close(writes)
