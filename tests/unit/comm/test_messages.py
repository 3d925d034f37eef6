"""Every message comes out of the wire as it went in, and nothing else comes out of it."""

from typing import get_args

import msgspec
import pytest

from instep.comm.encryption.certificates import Credentials
from instep.comm.protocol import messages
from instep.comm.protocol.messages import AnyMessage, Message, decode, encode

EXAMPLES = {
    str: "text é",
    int: 7,
    float: 0.5,
    bool: True,
    float | None: 0.25,
    str | None: "text",
    bytes: b"\x00\xff",
    dict[str, bytes]: {"a": b"\x00"},
    list[int]: [2, 0, 1],
    list[int] | None: [2, 0, 1],
    dict[str, int]: {"a": 3},
    tuple[int, ...]: (2, 1),
    int | None: 3,
    dict[str, str]: {"torch": "2.0"},
    list[tuple[int, int]]: [(0, 7), (1, 8)],
    messages.Failed | None: None,
    messages.Whereabouts | None: messages.Whereabouts(step=3, dataset="training", sample=5),
    Credentials | None: Credentials(own="of its own", authority="of the run"),
    list[Credentials]: [Credentials(own="of its own", authority="of the run")],
    list[messages.Mark]: [messages.Mark(dataset="training", sample=5)],
}


def example(cls):
    """One message of a class, every field given."""
    fields = msgspec.structs.fields(cls)
    return cls(**{f.name: EXAMPLES.get(f.type, {"a": 1.5}) for f in fields})


@pytest.mark.parametrize("cls", get_args(AnyMessage), ids=lambda cls: cls.__name__)
def test_a_message_of_every_class_survives_the_wire(cls):
    message = example(cls)
    again = decode(encode(message))
    assert again == message
    assert type(again) is cls


def test_every_class_of_message_may_arrive():
    named = vars(messages).values()
    defined = {each for each in named if isinstance(each, type) and issubclass(each, Message)}
    assert defined - {Message} == set(get_args(AnyMessage))


def test_the_nested_fields_of_an_event_survive():
    fields = {"phases": {"a": [1, 2.5, "x", True, None], "b": {"c": {}}}, "worker": 2}
    assert decode(encode(messages.Emit(name="worker_ready", fields=fields))).fields == fields


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(3),
        msgspec.msgpack.encode({"type": "Unheard"}),
        msgspec.msgpack.encode({"type": "Stop"}),
        msgspec.msgpack.encode({"type": "Stop", "rule": 3}),
        msgspec.msgpack.encode({"type": "Stop", "rule": "a", "more": 1}),
        encode(messages.Release()) + b"\x00",
    ],
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(msgspec.MsgspecError):
        decode(data)
