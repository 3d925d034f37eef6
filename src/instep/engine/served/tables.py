"""The sparse embeddings of a recipe's model, where their rows are on servers.

From the model to servers and back: rows that the recipe built, or that a checkpoint has, go to
the server that has them; checkpoints and the final model get them from there. How rows travel is
in `sync/servers/tables.py`, what a layer does without them in `parallel/embeddings.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from instep.engine.served.rows import RowUpdate
from instep.errors import CheckpointError, RecipeError, SpecError
from instep.job.spec import JobSpec
from instep.parallel.embeddings import is_sparse, leave_out, take_out
from instep.recipe.build import Built
from instep.state.open_pieces import open_pieces
from instep.state.pieces import ROWS
from instep.sync.servers.kept_rows import TableSpec
from instep.sync.servers.tables import Tables

_SOME = 1 << 16
"""Rows that are copied at a time."""


def refuse_sparse(model: nn.Module, job: JobSpec) -> None:
    """Refuse sparse embeddings, for strategies whose server has whole parameters.

    Raises:
        RecipeError: the model has one.
    """
    for name, layer in model.named_modules():
        if is_sparse(layer):
            raise RecipeError(
                f"the embedding {name!r} has sparse=True, and with sync.name = {job.sync.name!r} "
                "no rows of it can be sent. Use sync.name = 'server_sync', where servers have the "
                "rows, or leave sparse=True out."
            )


class ServedTables:
    """Of one process of a run. `made` comes before everything but `if`.

    Args:
        model: as the recipe built it; its sparse embeddings are changed.
        job: to refuse what does not go with them.
        batch_loss: whether the loss is of the whole global batch.

    Raises:
        RecipeError: an embedding does what needs its whole table, or the loss is of all.
        SpecError: the job wants what servers cannot do for embeddings.
    """

    tables: Tables

    def __init__(self, model: nn.Module, job: JobSpec, *, batch_loss: bool = False) -> None:
        self._model = model
        self._tables, self._asks = take_out(model)
        if self._tables and batch_loss:
            raise RecipeError(
                f"the rows of the embedding {self._tables[0].name!r} (sparse=True) are on servers, "
                "and a layer asks for them in a pass of its own; with Recipe.batch_loss each "
                "micro-batch has two. Leave sparse=True out, or use sync.name = 'all_reduce'."
            )
        if self._tables and job.train.ema is not None:
            raise SpecError(
                f"train.ema = {job.train.ema} averages whole parameters, and the rows of the "
                f"embedding {self._tables[0].name!r} (sparse=True) are on servers. Leave one of "
                "the two out."
            )
        if self._tables and job.train.batch_norm == "global":
            raise SpecError(
                "train.batch_norm = 'global' has servers compute passes too, and the rows of the "
                f"embedding {self._tables[0].name!r} (sparse=True) are asked of them meanwhile. "
                "Leave one of the two out."
            )

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._tables)

    @property
    def names(self) -> list[str]:
        """Of their weights."""
        return [table.name for table in self._tables]

    @property
    def numbers(self) -> int:
        """How many numbers they have in all."""
        return sum(table.rows * table.dim for table in self._tables)

    def made(self, built: Built) -> Built:
        """The optimizer is made: without the rows that stood for tables in it.

        Raises:
            RecipeError: nothing else is left.
        """
        update = RowUpdate(built.optimizer, self._tables)
        samples = {id(table.sample) for table in self._tables}
        leave_out(self._model, self._tables)
        parameters = [each for each in built.parameters if id(each) not in samples]
        if not parameters:
            raise RecipeError(
                "the model has no parameter beside its sparse embeddings, whose rows are on "
                "servers. Give it one, such as a bias of its output: nn.Parameter(torch.zeros(1))."
            )
        specs = [TableSpec(table.rows, table.dim, table.sample.dtype) for table in self._tables]
        self.tables = Tables(specs, update, self._built)
        self._asks.source = self.tables
        return dataclasses.replace(built, parameters=parameters)

    # ---- where a server gets its rows

    def _built(
        self, table: int, first: int, step: int, rows: Tensor, state: dict[str, Tensor]
    ) -> None:
        built = self._tables[table].initial
        assert built is not None, "let go of too early"
        for at in range(0, len(rows), _SOME):
            part = rows[at : at + _SOME]
            start = first + at * step
            part.copy_(built[start : start + step * len(part) : step])

    def let_go(self) -> None:
        """Nobody begins with what the recipe built from here on."""
        for table in self._tables:
            table.initial = None

    def load(self, checkpoint: Path, *, sees: bool = True) -> None:
        """The next generation begins with the rows of a checkpoint.

        Args:
            checkpoint: its folder.
            sees: whether this process sees it. A server that does not raises a CheckpointError
                when it is to take up its rows.
        """

        def fill(table: int, first: int, step: int, rows: Tensor, state: dict[str, Tensor]) -> None:
            if not sees:
                raise CheckpointError(
                    f"a server is to begin with rows of the embedding {self._tables[table].name!r} "
                    f"from {checkpoint}, and its host does not see this folder. Have servers on "
                    "hosts that do: of one machine, or with a shared folder."
                )
            pieces, name = open_pieces(checkpoint, {}).pieces, self._tables[table].name
            for of, into in ((f"model/{name}", rows), *_named(name, state)):
                if not into.dim():
                    into.copy_(pieces.read(of))
                for at in range(0, len(rows) if into.dim() else 0, _SOME):
                    part = into[at : at + _SOME]
                    start = first + at * step
                    stop = start + step * (len(part) - 1) + 1
                    box = ((start, stop), *((0, size) for size in part.shape[1:]))
                    part.copy_(pieces.read(of, box)[::step])

        self.tables.fill = fill

    # ---- what becomes of them

    def shard(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What this server writes into a checkpoint, and the metadata of the file; empty on a
        worker."""
        kept, found = self.tables.kept, dict[str, Tensor]()
        rows = dict[str, tuple[int, int, int]]()
        if kept is None:
            return {}, {}
        for number, table in enumerate(self._tables):
            own = {f"model/{table.name}": kept.values[number]}
            own |= dict(_named(table.name, kept.state[number]))
            rows |= {n: (table.rows, *kept.every) for n, each in own.items() if each.dim()}
            found |= own
        return found, {ROWS: json.dumps(rows)}

    def shapes(self) -> dict[str, Tensor]:
        """The whole tables by name, without memory."""
        return {
            table.name: torch.empty(table.rows, table.dim, dtype=table.sample.dtype, device="meta")
            for table in self._tables
        }

    def read(self, name: str) -> Iterator[Tensor]:
        """A whole table, some rows after the other; while reads may be asked."""
        number = self.names.index(name)
        for start in range(0, self._tables[number].rows, _SOME):
            stop = min(start + _SOME, self._tables[number].rows)
            yield self.tables.rows(number, torch.arange(start, stop))


def _named(name: str, state: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"optimizer/{name}/{kept}", each) for kept, each in state.items()]
