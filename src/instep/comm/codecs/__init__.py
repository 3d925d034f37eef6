"""How numbers look on the wire: the table of codecs.

A codec turns flat float32 values into fewer bytes and back. It knows nothing of networks, ranks or
optimizers, and has no state: the strategy keeps the residuals.

To add one: write a class that implements `base.Codec` in a file of its own, and add its row to
`CODEC_ROWS` in `job/sync/tables.py`, with its options if it has some.
The suite in `tests/contract/test_codecs.py` finds it, and `docs/guides/adding-a-codec.md` needs its
heading. One of a user's own needs no line: a job names it as `module:Class`.
"""

from instep.job.sync.tables import CODEC_ROWS
from instep.registry import Registry

CODECS = Registry("codec", {name: row.made_by for name, row in CODEC_ROWS.items()}, open=True)

OWN = ("linear", "segmentable", "unbiased", "fixed_size", "size", "encode", "add_into")
"""What a codec has; see `base.Codec`."""
