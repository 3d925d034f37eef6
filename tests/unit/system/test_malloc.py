"""Freed memory goes back to the system, in a process of its own."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from instep.system import malloc

SCRIPT = """
import ctypes, sys
from instep.system.malloc import return_freed_memory, return_unused_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident():
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])

def block(size):
    found = libc.malloc(size)
    libc.memset(found, 1, size)
    return found

print(return_freed_memory())
libc.free(block(30 << 20))  # left alone, glibc keeps blocks of this size from now on
before = resident()
blocks = [block(8 << 20) for _ in range(8)]
kept = block(1 << 10)  # above them
for each in blocks:
    libc.free(each)
print((resident() - before) >> 20)
small = [block(1 << 20) for _ in range(33)]
for each in small[:-1]:  # the last stays, above them
    libc.free(each)
left = resident() - before
return_unused_memory()
print(left >> 20, (resident() - before) >> 20)
"""


PAGES = """
import resource
from instep.launch.fork_server import _import_meshes, _import_torch
from instep.system.malloc import return_freed_memory

_import_torch()
assert return_freed_memory()
_import_meshes()
import torch

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.empty(8 << 20).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_large_tensor_takes_few_pages_where_the_system_has_large_ones():
    known = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not known.exists() or "[never]" in known.read_text():
        pytest.skip("the system has no large pages")
    ours = {name: value for name, value in os.environ.items() if name not in malloc._OWN}
    done = subprocess.run([sys.executable, "-c", PAGES], env=ours, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4000  # of 8,192


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("own", [False, True])
def test_freed_blocks_go_back_unless_the_user_has_other_thresholds(own):
    mmap, trim = malloc._OWN
    sizes = {mmap: str(32 << 20), trim: str(1 << 30)} if own else {}
    ours = {name: value for name, value in os.environ.items() if name not in malloc._OWN}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**ours, **sizes}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    did, left, small, unused = done.stdout.split()
    assert did == str(not own)
    assert (int(left) > 30) if own else (int(left) < 2)
    assert int(small) > 30, "smaller blocks are kept for the next request"
    assert int(unused) < 2
