"""What an own loop cannot give, and what its run says of being the same as on one machine.

From the job and the model alone: nothing is tried, for the user runs the passes. What the
user's code does to parameters and gradients meanwhile, `Guard` looks at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.comm.base import Comm
from instep.data.torch_loader import Unused
from instep.engine.alike import part_apart
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.job.start import StartSpec
from instep.job.train import TrainSpec
from instep.state.digest import digests

_APART = 0.01
"""Of its largest value, by which a tensor may differ between processes: machines of several kinds
round differently, and what is worth an error grows much larger."""


def verdict_of(model: nn.Module, train: TrainSpec, lost: Sequence[Unused]) -> str:
    """Whether a run of an own loop is shown to give the result of one machine.

    Args:
        model: to be trained.
        train: the job's.
        lost: what of the user's `DataLoader` is not kept.
    """
    if decisive := "; ".join(f"{text}. {remedy}" for text, remedy in lost if remedy):
        return f"no: {decisive}"
    layers = [
        f"{type(layer).__name__} {name!r}"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    more = f" (and {len(layers) - 1} more)" if len(layers) > 1 else ""
    if layers and train.merge == "always":
        return (
            "no: train.merge = 'always' joins the micro-batches of a process, and "
            f"{layers[0]}{more} sees all of them; so the result depends on the number of "
            "processes. Leave train.merge out"
        )
    if layers and train.micro_batches > 1:
        size = -(-train.global_batch // train.micro_batches)
        return (
            f"no: {layers[0]}{more} sees the {size} samples of a micro-batch, and in a loop over "
            f"whole batches it would see {train.global_batch}. Any number of processes gives the "
            "same; for the result of a loop over whole batches set train.micro_batches = 1, which "
            "leaves work for one process"
        )
    return "not shown: your own loop runs its passes by itself, so nothing could be tried"


def refuse(job: JobSpec) -> None:
    """What an own loop cannot give.

    Raises:
        SpecError: the job asks for it.
    """
    if job.train.batch_norm == "global":
        raise SpecError(
            "train.batch_norm = 'global' needs a recipe: in your own loop it is not known which "
            "pass a layer is in. Leave it out."
        )
    if job.train.steps is not None:
        raise SpecError(
            f"train.steps = {job.train.steps}: your own loop says how long it trains. Use "
            "train.epochs, and iterate over session.epochs(); to end within an epoch, leave the "
            "loop where session.step is your last step."
        )
    if job.train.precision != "float32":
        raise SpecError(
            f"train.precision = {job.train.precision!r}: your own loop casts by itself. "
            "Leave the key out, and use torch.autocast around your forward pass."
        )
    if job.start != StartSpec():
        raise SpecError(
            "[start] is set, but your own loop makes model and optimizer. Leave it out; load "
            "with instep.load_model(path, model), and freeze with requires_grad_(False)."
        )
    if job.data.split:
        raise SpecError(
            f"data.split = {job.data.split!r} divides the dataset of a recipe, and your own loop "
            "has its own. Leave it out; divide with torch.utils.data.random_split and a seeded "
            "generator, and give session.prepare both."
        )
    if job.lora.modules:
        raise SpecError(
            "[lora] is set, but your own loop makes model and optimizer. Leave it out; give "
            "session.prepare a model that has its adapters already, such as one of "
            "peft.get_peft_model."
        )
    if job.sync.rounds is not None and job.sync.participants != job.workers:
        raise SpecError(
            f"sync.participants = {job.sync.participants} with {job.workers} processes: in your "
            f"own loop each process is one participant. Start {job.sync.participants} processes, "
            f"set sync.participants to {job.workers}, or train a recipe."
        )
    if job.check.corruption:
        raise SpecError(
            "check.corruption = true: your own loop runs its passes by itself, so none can be "
            "computed twice. Leave it out."
        )
    if job.check.strict:
        raise SpecError(
            "check.strict = true: your own loop runs its passes by itself, so nothing can be "
            "tried, and it is not shown that the run gives the result of one machine. Leave it "
            "out, or train a recipe."
        )


class Guard:
    """Finds what the user's code does to parameters that other processes would not do alike.

    Args:
        model, optimizer: as they are when training begins.
        alone: whether each step is one pass, which may write what one machine may.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, alone: bool) -> None:
        named = list(model.named_parameters())
        self._model, self._optimizer, self._alone = model, optimizer, alone
        self._trained = [(name, p) for name, p in named if p.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._held = self._count()
        self._versions: list[int] = []
        self._had: set[str] = set()
        self.leaves_zeros = False
        """Whether the user's `zero_grad` sets gradients to zero, and not to None."""

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that need gradients."""
        return [parameter for _, parameter in self._trained]

    def begin_step(self) -> None:
        """From here on nothing but the optimizer is to write to parameters."""
        self._versions = [p._version for _, p in self._trained]

    def check_written(self, step: int) -> None:
        """The step's passes are over.

        Raises:
            SpecError: one of them, or the user's code between them, has written to a parameter.
        """
        if self._alone:
            return
        for (name, parameter), version in zip(self._trained, self._versions, strict=True):
            if parameter._version != version:
                raise SpecError(
                    f"step {step}: the parameter {name!r} was written to between the micro-batches "
                    "of the step, or by a forward pass (as an embedding with max_norm does): "
                    "processes have different micro-batches, so their models would differ. Write "
                    "after optimizer.step(), where session.sync_gradients is true."
                )

    def check_trained(self) -> None:
        """The optimizer is about to move.

        Raises:
            SpecError: it would move what the processes have not agreed on.
        """
        late = [name for name, parameter in self._frozen if parameter.requires_grad]
        if late:
            raise SpecError(
                f"the parameter {late[0]!r} needs a gradient now, and did not at prepare(): "
                "gradients are exchanged only of parameters that needed one then. To train it "
                "later, let it need one from the beginning, and set its .grad to None before "
                "optimizer.step() until then (where session.sync_gradients is true)."
            )
        if self._count() != self._held:
            raise SpecError(
                f"the optimizer holds {self._count()} parameters now, and held {self._held} at "
                "prepare(): gradients are exchanged only of those. Make all groups before it."
            )

    def check_zeros(self, step: int) -> None:
        """Every `.grad` holds the agreed gradient.

        Raises:
            SpecError: one is None that would be zero in a plain loop.
        """
        now = {name for name, parameter in self._trained if parameter.grad is not None}
        if self.leaves_zeros and (lacking := sorted(self._had - now)):
            raise SpecError(
                f"step {step}: no batch used the parameter {lacking[0]!r}. After "
                "zero_grad(set_to_none=False) a plain loop has a gradient of zero there, by which "
                "momentum and weight decay still move it; here it has none. Leave "
                "set_to_none=False out."
            )
        self._had |= now

    @torch.no_grad()
    def compare(self, comm: Comm) -> None:
        """Make sure that all processes have the same model; every one calls it.

        Raises:
            SpecError: they have not.
            PeerError: a process went away meanwhile.
        """
        if comm.size == 1:
            return
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        device = named[0][1].device
        table = torch.zeros(comm.size, len(named), dtype=torch.int64, device=device)
        found = digests(tensor for _, tensor in named)
        table[comm.rank] = torch.tensor([digest >> 1 for digest in found])
        comm.all_reduce(table).wait()
        for column in (table != table[0]).any(0).nonzero().flatten().tolist():
            name, tensor = named[column]
            far = torch.zeros(comm.size, dtype=torch.float64, device=device)
            differs = bool(table[comm.rank, column] != table[0, column])
            far[comm.rank] = _apart(tensor, comm, differs=differs)
            comm.all_reduce(far).wait()
            if not (far <= _APART).all():
                raise SpecError(
                    f"{name!r} has other values in process {int(far.argmax())} than in process 0: "
                    "the loops do not do the same. Whatever moves parameters must be alike in "
                    "every process: the optimizer's settings, edits of .grad and of parameters, "
                    "and the metrics and random numbers that decide on them."
                )


def _apart(tensor: Tensor, comm: Comm, *, differs: bool) -> float:
    """How far a tensor is from that of process 0, where its digest `differs` or not."""
    if tensor.layout != torch.strided:  # nothing rounds what is sparse
        return math.inf if differs else 0.0
    first = tensor.detach().clone().contiguous()
    comm.broadcast(first)
    return part_apart(tensor, first)
