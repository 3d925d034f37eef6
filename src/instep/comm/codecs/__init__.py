"""How numbers look on the wire: the table of codecs.

A codec turns flat float32 values into fewer bytes and back. It knows nothing of networks, ranks or
optimizers, and has no state: the strategy keeps the residuals.

To add one: write a class that implements `base.Codec` in a file of its own, and add its line here,
and another to `DEFAULTS` if it has options.
The suite in `tests/contract/test_codecs.py` finds it, and `docs/guides/adding-a-codec.md` needs its
heading. One of a user's own needs no line: a job names it as `module:Class`.
"""

from typing import Any

from instep.registry import Registry

CODECS = Registry(
    "codec",
    {
        "none": "instep.comm.codecs.none:Identity",
        "bfloat16": "instep.comm.codecs.short:BFloat16",
        "float16": "instep.comm.codecs.short:Float16",
        "int8": "instep.comm.codecs.int8:Int8",
        "int4": "instep.comm.codecs.int4:Int4",
        "sign": "instep.comm.codecs.sign:Sign",
        "dgc": "instep.comm.codecs.dgc:DGC",
        "nonzero": "instep.comm.codecs.nonzero:NonZero",
        "powersgd": "instep.comm.codecs.powersgd:PowerSGD",
        "top_k": "instep.comm.codecs.top_k:TopK",
    },
    open=True,
)

DEFAULTS: dict[str, dict[str, Any]] = {
    "int8": {"block": 1024, "rounding": "nearest"},
    "int4": {"block": 64, "rounding": "nearest"},
    "sign": {"block": 1024},
    "dgc": {"density": 0.001, "warm_up": 100, "clip": 0.0},
    "powersgd": {"rank": 4, "start_after": 100},
    "top_k": {"density": 0.01},
}
"""The options of each that has some, as they are if they are left out. A run writes them down
(`SyncSpec.defaults`)."""

OWN = ("linear", "segmentable", "unbiased", "fixed_size", "size", "encode", "add_into")
"""What a codec has; see `base.Codec`."""
