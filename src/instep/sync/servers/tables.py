"""Embedding tables on servers: a worker pulls the rows of its batches, and pushes their gradients.

Row `r` of a table is row `r // S` of server `r % S`: rows that many batches have are spread. A
worker asks for each row once in a step, which is a read: it moves nothing. After its passes it
sends the gradient of each row once; a server adds up in the order of the ranks, or where bits
are wanted in that of the passes. Only these rows are moved (`kept_rows.py`).

A server answers while passes run, each worker in a thread, until that one says that it asks for
nothing more. It does so before it sends anything else, so that messages keep their order.

Way in: `Tables`. It knows neither layers nor optimizers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.errors import RecipeError
from instep.sync.generation import Memory
from instep.sync.servers.kept_rows import Fill, KeptRows, RowMover, TableSpec, added_up

_END = -1
"""In the place of a table: this worker asks for nothing more."""


class _Gradient(NamedTuple):
    """Of some rows of a table."""

    unit: int
    """The pass that gave it; 0 where passes are added up."""
    table: int
    ids: Tensor
    """[rows] int64, ascending, each once."""
    values: Tensor
    """[rows, dim], weighted."""


class Tables:
    """One rank's end of all tables of a model.

    Args:
        specs: of the tables.
        mover: the optimizer, for rows.
        fill: gives a server the rows that it begins with.
    """

    def __init__(self, specs: Sequence[TableSpec], mover: RowMover, fill: Fill) -> None:
        self.specs, self._mover = list(specs), mover
        self.fill: Fill | None = fill
        """What the next `start` of a server takes its rows from; None for what it has."""
        self.waiting: Callable[[], Any] = nullcontext
        """A context in which this worker only waits for servers."""
        self.bytes_pulled = self.bytes_pushed = 0
        """That this worker asked for and got, and that it sent, since the process began."""
        self.kept: KeptRows | None = None
        """On a server, its rows."""
        self._left: Mapping[str, Tensor] = {}
        self._asks = self._in_step = False
        self._threads = list[threading.Thread]()
        self._broken: BaseException | None = None

    # ---- generations

    def load_left(self, left: Mapping[str, Tensor]) -> None:
        """What lies in memory, as `staged` gave it for the last commit: the rows lie there too."""
        self._left, self.fill = {name: each.clone() for name, each in left.items()}, None

    def start(
        self, comm: Comm, servers: Sequence[int], memory: Memory | None, *, by_unit: bool
    ) -> None:
        """A generation begins; a server has its rows when it returns."""
        self._comm, self._servers, self._by_unit = comm, list(servers), by_unit
        self._workers = [rank for rank in range(comm.size) if rank not in self._servers]
        self._asks = self._in_step = False
        self._threads, self._broken = [], None
        self._forget()
        if comm.rank in self._servers:
            mine = self._servers.index(comm.rank)
            if self.kept is None:
                assert memory is not None
                self.kept = KeptRows(self.specs, self._mover, mine, len(self._servers), memory)
            self.kept.take(self.fill, self._left)
        self.fill, self._left = None, {}

    def _forget(self) -> None:
        self._cache = dict[int, tuple[Tensor, Tensor]]()
        self._gradients = list[_Gradient]()

    # ---- reads

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In this context workers may ask for rows; every rank enters it, and leaves it when all
        workers have.

        Raises:
            PeerError: a rank went away.
        """
        self._open()
        yield
        self.close()

    def _open(self) -> None:
        assert not self._threads, "reads within reads"
        self._asks, self._broken = True, None
        for worker in self._workers if self.kept is not None else ():
            thread = threading.Thread(
                target=self._serve, args=(worker, self._comm), name="instep rows", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """This worker asks for nothing more; a server waits until none does. A second call does
        nothing."""
        if not self._asks:
            return
        self._asks = False
        if self.kept is None:
            for server in self._servers:
                self._comm.send(torch.tensor([_END, 0]), server).wait()
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._broken is not None:
            raise self._broken

    def _serve(self, worker: int, comm: Comm) -> None:
        assert self.kept is not None
        head = torch.zeros(2, dtype=torch.int64)
        try:
            while True:
                comm.receive(head, worker).wait()
                table, count = head.tolist()
                if table == _END:
                    return
                ids = torch.empty(count, dtype=torch.int32)
                comm.receive(ids, worker).wait()
                comm.send(self.kept.values[table][ids.long()], worker).wait()
        except BaseException as error:  # raised where the thread is waited for
            self._broken = error

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """As of the last commit; in a step each is asked for once.

        Raises:
            PeerError: a server went away.
        """
        known = self._cache.get(table)
        if known is None:
            found = self._pulled(table, ids)
        else:
            at = torch.searchsorted(known[0], ids).clamp_(max=len(known[0]) - 1)
            missing = known[0][at] != ids
            found = known[1][at]
            if bool(missing.any()):
                new = ids[missing]
                found[missing] = values = self._pulled(table, new)
                every, order = torch.cat([known[0], new]).sort()
                known = every, torch.cat([known[1], values])[order]
        if self._in_step and len(ids):
            self._cache[table] = known or (ids, found)
        return found.detach()

    def _pulled(self, table: int, ids: Tensor) -> Tensor:
        if not self._asks:
            raise RecipeError(
                "an embedding with sparse=True was called outside of passes and validations, as in "
                "a callback: with sync.name = 'server_sync' its rows are on servers, which give "
                "them only there. Measure it in Recipe.metrics, or leave sparse=True out."
            )
        spec, coming = self.specs[table], []
        for number, server in enumerate(self._servers):
            mine = ids % len(self._servers) == number
            own = (ids[mine] // len(self._servers)).int()
            if not len(own):
                continue
            rows = torch.empty(len(own), spec.dim, dtype=spec.dtype)
            head = torch.tensor([table, len(own)])
            works = [self._comm.send(head, server), self._comm.send(own, server)]
            works.append(self._comm.receive(rows, server))
            coming.append((mine, rows, works))
            self.bytes_pulled += head.nbytes + own.nbytes + rows.nbytes
        out = torch.empty(len(ids), spec.dim, dtype=spec.dtype)
        with self.waiting():
            for mine, rows, works in coming:
                for work in works:
                    work.wait()
                out[mine] = rows
        return out

    # ---- a step

    def begin_step(self) -> None:
        """Passes are about to run, or to run once more."""
        self._forget()
        if not self._asks:
            self._open()
        self._in_step = True

    def begin_pass(self, weight: float, unit: int) -> None:
        """The gradients that come count `weight`."""
        self._weight, self._unit = weight, unit if self._by_unit else 0

    def gradient(self, table: int, ids: Tensor, gradient: Tensor) -> None:
        """What a backward pass gave for some rows."""
        if self._in_step:
            self._gradients.append(_Gradient(self._unit, table, ids, gradient * self._weight))

    @torch.no_grad()
    def exchange(self) -> None:
        """Workers send what they have; servers add up.

        Raises:
            PeerError: a rank went away.
        """
        self._in_step = False
        if self.kept is None:
            self._push()
        else:
            self.kept.sum(self._taken())
        self._forget()

    def _push(self) -> None:
        count, works, own = len(self._servers), [], _merged(self._gradients)
        for number, server in enumerate(self._servers):
            parts = [(each, each.ids % count == number) for each in own]
            sent = [torch.tensor([len(parts)])]
            if parts:  # also of tables of which this server has no row: they have a step
                sent += [torch.tensor([[e.unit, e.table, int(mine.sum())] for e, mine in parts])]
            for each, mine in parts:
                if bool(mine.any()):
                    sent += [(each.ids[mine] // count).int(), each.values[mine]]
            works += [self._comm.send(tensor, server) for tensor in sent]
            self.bytes_pushed += sum(tensor.nbytes for tensor in sent)
        for work in works:
            work.wait()

    def _taken(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By table, the rows that any worker has a gradient for, and its sum."""
        comm, came, works = self._comm, list[_Gradient](), []
        counts = {worker: torch.zeros(1, dtype=torch.int64) for worker in self._workers}
        for work in [comm.receive(count, worker) for worker, count in counts.items()]:
            work.wait()
        heads = {w: torch.zeros(int(n), 3, dtype=torch.int64) for w, n in counts.items() if int(n)}
        for work in [comm.receive(head, worker) for worker, head in heads.items()]:
            work.wait()
        for worker, head in heads.items():
            for unit, table, count in head.tolist():
                spec = self.specs[table]
                ids = torch.empty(count, dtype=torch.int32)
                values = torch.empty(count, spec.dim, dtype=spec.dtype)
                if count:
                    works += [comm.receive(ids, worker), comm.receive(values, worker)]
                came.append(_Gradient(unit, table, ids, values))
        for work in works:
            work.wait()
        came.sort(key=lambda each: each.unit)  # those of one unit stay in the order of the ranks
        return {
            table: added_up(
                [(each.ids.long(), each.values) for each in came if each.table == table]
            )
            for table in sorted({each.table for each in came})
        }


def _merged(gradients: Sequence[_Gradient]) -> list[_Gradient]:
    """One for each table and unit."""
    by_place = dict[tuple[int, int], list[_Gradient]]()
    for each in gradients:
        by_place.setdefault((each.unit, each.table), []).append(each)
    return [
        same[0]
        if len(same) == 1
        else _Gradient(*place, *added_up([(each.ids, each.values) for each in same]))
        for place, same in by_place.items()
    ]
