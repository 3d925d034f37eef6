"""Write `docs/concepts/what-goes-together.md` from the table that jobs are checked by.

python docs/make_together.py            write the page
python docs/make_together.py --check    exit 1 if the page is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from instep.comm.codecs import CODECS
from instep.job.sync.tables import STRATEGY_ROWS
from instep.sync import STRATEGIES
from instep.sync.clashes import AXES, CLASHES
from instep.sync.settings import NOT_IN_ROUNDS, SETTINGS

PAGE = Path(__file__).resolve().parent / "concepts" / "what-goes-together.md"


def setting_of(strategy: str) -> tuple[str, ...]:
    """What the table calls it: those of a kind have one name there."""
    row = STRATEGY_ROWS[strategy]
    return ("averaging" if row.rounds else "leased" if row.leased else strategy,)


def codec_settings(codec: str) -> tuple[str, ...]:
    """What a job with it asks for."""
    if codec not in NOT_IN_ROUNDS:
        return ("codec",)
    return ("codec", "no_rounds", *(name for name in (codec,) if name in SETTINGS))


ROWS: dict[str, tuple[str, ...]] = {
    **{f"`sync.name = {name!r}`": setting_of(name) for name in STRATEGIES},
    "all_reduce, `delayed = true`": ("delayed",),
    "averaging, `local_optimizers = 'kept'`": ("averaging",),
    "averaging, `partition = 'blocks'`": ("averaging", "own_data"),
    **{f"`sync.codec = {name!r}`": codec_settings(name) for name in CODECS if name != "none"},
    "`train.determinism = 'bits'`": ("bits",),
    "averaging with `determinism = 'bits'`": ("averaging", "bits"),
    "`train.batch_norm = 'global'`": ("batch_norm",),
    "`train.precision = 'bfloat16'`": (),
    "`train.precision = 'float16'`": ("float16",),
    "`train.merge = 'always'`": ("merge",),
    "`train.max_grad_norm`": ("clipping",),
    "`stop.gradient_norm`": ("norm_rule",),
    "`check.corruption`": ("corruption",),
    "`start.learning_rates`": ("learning_rates",),
    "`data.parts` of shards": ("parts",),
    "`data.balance` (`resample`, `augment`, `stratified`)": ("balance",),
    "`data.balance = 'reweight'`": ("balance", "reweight"),
    "`train.tokens_per_batch`": ("tokens",),
    "`[[data.sources]]`": ("sources",),
    "a [stream](../guides/streams.md) (`IterableDataset`)": ("iterable",),
    "a stream that is read once (`data.once`)": ("once", "iterable"),
    "a loop of your own": ("own_loop",),
    "`Recipe.turns`": ("turns",),
    "`Recipe.batch_loss`": ("batch_loss",),
}
"""What the page tells of, and the settings that it takes."""

COLUMNS: dict[str, tuple[str, ...]] = {
    "no `[mesh]`": (),
    **{f"`{axis}`": (axis,) for axis in AXES},
    "several": AXES,
}

OF_MODELS = {
    ("batch_norm", "stages"): "a model with a BatchNorm that trains is "
    "[refused there](pipelines.md#which-models), and others have nothing to normalise"
}
"""Pairs that no job is refused for, but every model to which they would matter."""

_OPENING = """# What goes together

After this page you know which settings of a job, and which parts of a recipe, can be used together.
For one job you need no table. Ask, and every reason is printed, before anything is trained:

```sh
instep check job.toml
```

```text
mesh.shard = 2 does not go with check.corruption = true: it compares states that every worker has.
Leave one of the two out.
```

In short:

- With `all_reduce`, the default, nearly everything goes together: every codec, and every mesh.
- Servers ([`server_sync`, `bounded_stale`, `server_async`](strategies-with-servers.md)) hold whole
  parameters, so there is no mesh with them; without lockstep (the last two) there is no global
  batch to normalise over or to compare.
- Rounds ([`averaging` and its kin](averaging-family.md)) go with meshes, and with most codecs.
- [Sharded parameters](../guides/sharding.md) exclude what needs a whole copy of the model on each
  worker.

`docs/make_together.py` writes this page, from the table that jobs are checked by
(`src/instep/sync/clashes.py`) and what a model is refused for.

## With a mesh

A [replica of several processes](../guides/sharding.md) is one worker to what happens between
replicas: a participant of [averaging](../guides/averaging.md) is a whole replica, and each of its
processes sends, encodes and remembers what it has of the parameters. "several" is a mesh with more
than one of these axes.

"""

_NAMES = {
    "cuda": "`train.device = 'cuda'`",
    "private": "`[privacy]`",
    "reweight": "`data.balance = 'reweight'`",
    "ema": "`train.ema`",
    "once": "`data.once`",
    "clip": "`sync.options.clip`",
    "median": "`sync.options.combine = 'median'`",
    "stratified": "`data.balance = 'stratified'`",
    "in_order": "`data.order = 'dataset'`",
    "sampler": "a `DataLoader` with a `WeightedRandomSampler`",
    "draws": "a `DataLoader` whose [sampler draws](../guides/your-own-model.md#a-dataloader)",
    "length_sampler": "a `DataLoader` with a sampler by length",
    "own_data": "`sync.options.partition`",
    "start_after": "`sync.options.start_after`",
    "streams": "`sync.options.fragments`",
    "local_parameters": "`sync.options.local_parameters`",
    "local_optimizers": "`local_optimizers = 'reset'`",
    "fraction": "`sync.options.fraction` below 1",
    "no_rounds": " or ".join(f"`{name}`" for name in sorted(NOT_IN_ROUNDS)),
    **{name: f"`sync.codec = {name!r}`" for name in ("dgc", "powersgd")},
}
"""Settings that have no row of their own."""

_LETTERS = "abcdefgh"

_BESIDE = """`dgc` needs `torch.optim.SGD`. A codec of your own goes with
`all_reduce`; with servers and the strategies that have rounds if it is `segmentable` and of
`fixed_size` ([what that means](../guides/adding-a-codec.md#what-a-codec-must-do))."""

_REASONS = """
Why not: {reasons}

In `stages` with `shard`, `zero` must be 2.

With averaging, a participant's samples of a local step are cut into one part for each process of
`shard`. A layer that looks at its batch sees that part, and dropout is drawn for it. With
`local_optimizers = "kept"` the mesh cannot change when the run is resumed, as with
`determinism = "bits"`.

{codecs}
## Without one

All other pairs of the settings above go together, but for a loop of your own, which takes less by
itself ([its guide](../guides/from-python-and-torchrun.md#your-own-loop)). These do not:

| | | why |
|---|---|---|
"""

_END = """
Next: [strategies](strategies.md), or [sharding a model](../guides/sharding.md).
"""


def clash(one: Iterable[str], other: Iterable[str]) -> str:
    """Why two groups of settings do not go together; empty if they do."""
    every, among = set(one), set(other)
    for (first, second), why in (CLASHES | OF_MODELS).items():
        if (first in every and second in among) or (second in every and first in among):
            return why
    return ""


def page() -> str:
    """The whole page."""
    reasons: list[str] = []
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row, wanted in ROWS.items():
        cells = []
        for column in COLUMNS.values():
            whys = {axis: why for axis in column if (why := clash(wanted, (axis,)))}
            reasons += [why for why in dict.fromkeys(whys.values()) if why not in reasons]
            if len(whys) < len(column):
                cells.append(f"without {' and '.join(f'`{a}`' for a in whys)}" if whys else "yes")
            else:
                numbers = sorted({reasons.index(why) + 1 for why in whys.values()})
                cells.append(f"no ({', '.join(map(str, numbers))})" if whys else "yes")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    numbered = "; ".join(f"({n}) {why}" for n, why in enumerate(reasons, 1))
    pairs = [
        f"| {_name(one)} | {_name(other)} | {why} |"
        for (one, other), why in CLASHES.items()
        if one not in AXES and other not in AXES
    ]
    table = "\n".join(lines) + "\n"
    middle = _REASONS.format(reasons=f"{numbered}.", codecs=codecs())
    return _OPENING + table + middle + "\n".join(pairs) + "\n" + _END


def codecs() -> str:
    """Which codec goes with which strategy."""
    lines = [
        "## Codecs with strategies\n",
        f"| | {' | '.join(f'`{name}`' for name in STRATEGIES)} |",
        "|---" * (len(STRATEGIES) + 1) + "|",
    ]
    reasons: list[str] = []
    for codec in CODECS:
        cells = []
        for strategy in STRATEGIES:
            why = clash(codec_settings(codec), setting_of(strategy)) if codec != "none" else ""
            reasons += [why] if why and why not in reasons else []
            cells.append(f"no ({_LETTERS[reasons.index(why)]})" if why else "yes")
        lines.append(f"| `{codec}` | {' | '.join(cells)} |")
    lettered = "; ".join(f"({_LETTERS[n]}) {why}" for n, why in enumerate(reasons))
    return "\n".join(lines) + f"\n\nWhy not: {lettered}. {_BESIDE}\n"


def _name(setting: str) -> str:
    """As the first row that takes only this one calls it."""
    named = (row for row, wanted in ROWS.items() if wanted == (setting,))
    return next(named, _NAMES.get(setting, setting))


def main() -> int:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
