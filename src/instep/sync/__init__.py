"""How replicas agree on parameters: the table of strategies.

To add one: write a class that keeps the promises of `base.Strategy` in a file of its own, and add
its row to `STRATEGY_ROWS` in `job/sync/tables.py`, with its options if it has some. Those of two
families lie in `rounds/` and `servers/`. The suite in `tests/contract` finds it, and a page of
`docs/concepts/strategies*.md` needs its heading.
"""

from instep.job.sync.tables import STRATEGY_ROWS
from instep.registry import Registry

STRATEGIES = Registry("sync strategy", {name: row.made_by for name, row in STRATEGY_ROWS.items()})
