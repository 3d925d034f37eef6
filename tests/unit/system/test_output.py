"""Who prints never waits for who reads, and loses nothing to one that pauses for a while."""

import io
import os

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
