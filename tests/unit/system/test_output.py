"""Printing neither waits for a reader nor fails, and loses nothing to a reader that pauses."""

import io
import os
import subprocess
import sys

import pytest

from instep.system.output import MOST_CHARACTERS, Output


def pipe():
    read, write = os.pipe()
    return open(read, "rb"), open(write, "w", encoding="utf-8")


def test_what_is_printed_into_a_full_pipe_is_there_when_somebody_reads():
    reader, stream = pipe()
    output = Output(stream)
    lines = [f"line {number}\n" for number in range(30_000)]  # several times what a pipe holds
    for line in lines:
        print(line, end="", file=output)
    assert not output.drain(0.1)
    sent = "".join(lines).encode()
    assert b"".join(reader.read(len(sent) // 10) for _ in range(10)) == sent[: len(sent) // 10 * 10]
    assert output.drain(20.0)
    reader.close()
    print("to nobody", file=output)
    assert output.drain(20.0)


def test_what_nobody_reads_does_not_grow_for_ever():
    reader, stream = pipe()
    output = Output(stream)
    for _ in range(10):
        output.write("x" * (MOST_CHARACTERS // 2))
    assert output._waiting <= 1.5 * MOST_CHARACTERS
    reader.close()
    assert output.drain(20.0)


def test_it_looks_like_the_stream_that_it_stands_for(tmp_path):
    with (tmp_path / "file").open("w", encoding="utf-16") as stream:
        output = Output(stream)
        assert (output.isatty(), output.fileno()) == (False, stream.fileno())
        assert output.encoding == "utf-16"
    assert Output(io.StringIO()).write("four") == 4


PRINTS = """
import os
import sys
from instep.system.output import drop_unwritable_output
drop_unwritable_output()
for n in range(2000):
    print("line", n)
sys.stdout.flush()
print("last", file=sys.stderr)
sys.stdout.flush()
os._exit(7)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("full", ["/dev/full", ""])
def test_a_worker_prints_on_though_its_log_is_on_a_full_disk(tmp_path, full, unbuffered):
    log = full or tmp_path / "log"
    with open(log, "ab") as file:
        command = [sys.executable, "-c", PRINTS]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False)
    assert done.returncode == 7
    if not full:
        lines = (tmp_path / "log").read_text().split("\n")
        assert lines == [*(f"line {n}" for n in range(2000)), "last", ""]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_without_it_the_print_raises():
    program = PRINTS.replace("drop_unwritable_output()\n", "", 1)
    with open("/dev/full", "ab") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=file, stderr=file, check=False
        )
    assert done.returncode != 7
