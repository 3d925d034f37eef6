"""Forks that do one thing: what a program's `Popen` says of a program, they say of themselves."""

import signal
import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys, time
from instep.system.forks import Fork

extra = os.dup2(2, 100)

def echo(reads, writes):
    there = sorted(int(each) for each in os.listdir("/proc/self/fd"))
    with open("/proc/self/comm") as name:
        os.write(writes, f"{name.read().strip()} {extra in there}\\n".encode())
    while data := os.read(reads, 100):
        os.write(writes, data.upper())
    if data == b"":
        raise SystemExit(7)

one = Fork(echo, name="instep-echo")
assert one.poll() is None
print(one.stdout.readline().decode(), end="")
one.stdin.write(b"what\\n")
one.stdin.flush()
print(one.stdout.readline().decode(), end="")
one.stdin.close()
while one.poll() is None:
    time.sleep(0.001)
print(one.returncode, one.poll())
other = Fork(echo, name="instep-echo")
other.kill()
while other.poll() is None:
    time.sleep(0.001)
other.kill()
print(other.returncode)
"""


def test_a_fork_talks_by_pipes_holds_no_other_file_and_ends_with_a_code():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=600)
    name, said, code, killed = done.stdout.splitlines()
    linux = Path("/proc/self/comm").exists()
    assert name == ("instep-echo False" if linux else name)
    assert said == "WHAT"
    assert code == "1 1"
    assert killed == str(-signal.SIGKILL)
    assert "SystemExit" in done.stderr
