"""How numbers look on the wire: the table of codecs.

A codec turns flat float32 values into fewer bytes and back. It knows nothing
of networks, ranks or optimizers, and keeps no memory: whoever moves its
payloads carries over what it dropped.

To add one: write a class that keeps the promises of `base.Codec` in a file of
its own, and add its line here. The suite in `tests/contract/test_codecs.py`
finds it, and `docs/guides/adding-a-codec.md` needs its heading.
"""

from instep.registry import Registry

CODECS = Registry(
    "codec",
    {
        "none": "instep.comm.codecs.none:Identity",
        "int8": "instep.comm.codecs.int8:Int8",
    },
)
