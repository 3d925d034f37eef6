"""A replica that is a mesh of processes, and how this process enters.

The group of a replica is formed once, when its processes build their models, and lives as long as
they do: one that loses a process is started again whole. How the model is split is known to
`parallel/`; steps are not known here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from instep.comm.alone import AloneComm
from instep.comm.base import Comm
from instep.comm.torch_comm import TorchComm
from instep.data.loader import Loader
from instep.engine.alike import align_parameters
from instep.engine.member import Member
from instep.errors import RecipeError
from instep.state.boxes import MeshRank, holders, primary
from instep.worker.replica.layout import told_layout
from instep.worker.replica.same_batch import SameBatch
from instep.worker.trial.hooked import hooked_parameter

if TYPE_CHECKING:
    from instep.parallel.layout import Example, MeshLayout
    from instep.parallel.pipeline.staged import Staged


class Replica:
    """This process's end of its replica, and its part of the model.

    Args:
        member: this worker's membership in the run.
        model: built, whole; afterwards each process has its part of the parameters.
        device: where it computes.
        layout: of the model, on the first process of the replica; where it has one.
        example: of what is trained on, where there is a layout.
        alike: whether the values of `model` are those that it trains from, so that they must be
            the same in every process.

    Raises:
        RecipeError: the model cannot be split, or is another one in another process; or the
            program has made torch's default group.
        PeerError: another process of the replica was lost meanwhile.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        device: torch.device,
        layout: MeshLayout | None = None,
        example: Example | None = None,
        *,
        alike: bool = False,
    ) -> None:
        from instep.parallel.replica_group import ReplicaGroup  # takes half as long as torch

        mesh = member.job.mesh
        self.device, self._axes = device, mesh.axes
        place, address = member.number % mesh.ranks, member.address
        own = mesh.coordinate(member.number)
        self.tells = own.tensor == 0 and own.stage == mesh.stages - 1
        """Whether this process tells the losses of its passes, and which samples it could not
        read: of those that get the same micro-batch, one does."""
        self.proposes = own.tensor == 0
        """Whether it tells what its passes do to buffers, and the statistics of its batches."""
        store = member.replica_store()
        self._group = ReplicaGroup(store, place, mesh, device=device, address=address)
        store = member.replica_store("comm ")
        self.comm = TorchComm(store, place, mesh.ranks, device=device, address=address)
        """Its processes; for what they agree on before the first generation."""
        self._beside = [
            n for n in mesh.replica(own.replica) if mesh.coordinate(n).shard == own.shard
        ]
        """Those that get the same batches, this process among them."""
        self._batch_comm: Comm = AloneComm()
        if mesh.same_batch > 1:
            store = member.replica_store(f"batch {own.shard} ")
            at = self._beside.index(member.number)
            self._batch_comm = TorchComm(store, at, mesh.same_batch, device=device, address=address)
        if all(self.gather(int(alike))):  # one process may have less memory
            exact = member.job.train.determinism == "bits"
            taken = align_parameters(model, self.comm, exact=exact)
            if taken is not None:
                member.emit("parameters_taken", worker=member.number, **taken._asdict())
        self._mesh, self._layout = mesh, told_layout(self.comm, layout, device)
        self.draws_by_block = self._layout.draws
        """Whether its model draws random numbers for each block and part of a micro-batch."""
        self._take(model, example)
        self._rank = MeshRank(mesh, member.number)

    def _take(self, model: nn.Module, example: Example | None) -> None:
        from instep.parallel.split import split

        mesh = self._mesh
        self._split = split(model, self.device, self._group, mesh, self._layout, example)
        self.stages: Staged | None = self._split if mesh.stages > 1 else None
        """The model, if it is cut into stages: then its passes go forward and back in one."""

    def with_model(self, model: nn.Module, example: Example | None) -> Replica:
        """The same processes with a copy of the model, which is split like the model; all of them
        call this together.

        Args:
            model: whole.
            example: as for the model.
        """
        other = copy.copy(self)
        other._take(model, example)
        return other

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that uses the model; all processes of the replica do so together.

        Returns:
            What it returns; with stages on the last one only, elsewhere None.
        """
        return self._split.run(function, *arguments)

    def share_batches(
        self,
        loader: Loader,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """From now on, have this loader hand out what all processes have that get the same batches.

        Args:
            loader: each of them reads the same slices from its own.
            waiting: the context in which this process only waits for the others.
        """
        comm = self._batch_comm
        if comm.size > 1:
            loader.agree = SameBatch(comm, self._beside, self._axes, loader, self.device, waiting)

    def gather(self, own: int) -> list[int]:
        """A number of each of its processes, in rank order; all call it at the same time.

        Raises:
            PeerError: one of them was lost.
        """
        every = torch.zeros(self.comm.size, dtype=torch.int64, device=self.device)
        every[self.comm.rank] = own
        self.comm.all_reduce(every).wait()
        numbers: list[int] = every.tolist()
        return numbers

    def set_counts(self, counts: bool) -> None:
        """Whether the gradients of this process's next passes count."""
        self._split.set_counts(counts)

    def finish_pass(self) -> None:
        """A backward pass is over."""
        self._split.finish_pass()

    def slots(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """For each parameter one that is this rank's part of it, on the same memory."""
        slots: list[nn.Parameter] = self._split.slots.of(parameters)
        return slots

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds its part of a parameter to a sum over the replica."""
        shared = self.stages is not None and self.stages.shares(parameter)
        return primary(parameter, self._rank) and not shared

    def holders(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The ranks of this replica that have the same part of a parameter, in their order."""
        stages = self.stages.holders(parameter) if self.stages is not None else ()
        return holders(parameter, self._rank, stages)

    def close(self) -> None:
        """Leave the groups; a second call does nothing."""
        self._batch_comm.close()
        self.comm.close()
        self._group.close()


def check_model(model: nn.Module) -> None:
    """Refuse a model of which something is lost where others take the place of its parameters.

    Raises:
        RecipeError: a parameter has a hook on its gradient, or shares its memory.
    """
    if hooked := hooked_parameter(model):
        raise RecipeError(
            f"[mesh] cannot split a model with a hook on the gradient of a parameter, as on "
            f"{hooked!r}: a process has only a part of it. Scale the loss, give the optimizer a "
            "group of its own for it, or hook the module (register_full_backward_hook)."
        )
    parameters = set(dict(model.named_parameters()))
    places = sorted(
        (*_memory(tensor), name)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.numel() and tensor.layout is torch.strided and not tensor.is_meta
    )
    for (_, stop, one), (first, _, other) in pairwise(places):
        if first < stop and parameters & {one, other}:
            raise RecipeError(
                f"[mesh] cannot split a model of which {one!r} and {other!r} lie in the same "
                "memory: it would be cut apart. Use one nn.Parameter in both places, or copy it."
            )


def _memory(tensor: Tensor) -> tuple[int, int]:
    """First address, and the one after the last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
