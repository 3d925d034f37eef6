"""What a strategy is: how replicas come from their own gradients to a common step.

A strategy sees the parameters that this rank owns and a `Comm` to the ranks
that own the same ones in the other replicas. It is given gradients, one by one,
and knows nothing of models, hooks, data or optimizers. It lives as long as its
process; `start` and `stop` bound a generation. A step is a transaction: what
`exchange` leaves staged needs nobody else, and `apply` or `abandon` ends it, in
this generation or in the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.comm.codecs import CODECS, OWN
from instep.errors import SpecError
from instep.job.sync import SyncSpec
from instep.job.sync.rounds import OF_FRAGMENTS
from instep.job.sync.tables import STRATEGY_ROWS, UNKNOWN
from instep.records import Attempt, Law
from instep.sync import STRATEGIES
from instep.sync.generation import Generation

Result = TypeVar("Result")


class Price(NamedTuple):
    """What one rank sends for one step, for the planner to add up."""

    sent_bytes: float
    messages: float


class Strategy(Protocol):
    """How replicas agree.

    In each step a rank runs any number of backward passes, also none. Each is
    announced with its weight: the share of the global batch that it stands
    for. Over all ranks and passes of a step the weights add up to 1. Every rank
    exchanges and applies the same steps in the same order.
    """

    @property
    def laws(self) -> Mapping[str, Law]:
        """What this rank alone remembers, by kind, and what becomes of it when another takes its
        place; empty where `state` is all there is. With it a commit needs a vote: what one rank
        alone has staged cannot be copied from another that committed."""

    def start(self, parameters: Sequence[Parameter], comm: Comm, generation: Generation) -> None:
        """A generation begins; every rank holds the same parameters, and nothing is staged.

        Args:
            parameters: those that are trained, in the same order everywhere.
            comm: the ranks that agree.
            generation: what else is to be known of it.

        Raises:
            PeerError: a rank went away; `resolve` comes before the next `start`.
        """

    @property
    def start_in_doubt(self) -> int:
        """The generation whose `start` raised PeerError when this rank knew that all others had
        laid out what they alone remember, and not whether they knew; else -1."""

    def resolve(self, generation: int) -> None:
        """A `start` raised PeerError: it counts if it was that of this generation."""

    def begin_step(self, attempt: Attempt) -> None:
        """The passes of a step are about to run, or to run once more, towards this commit."""

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """A backward pass is about to run whose gradients count `weight`.

        `last` says that this rank runs no other in this step, so what is
        ready may be sent while the pass continues. `unit` is the number of what it computes,
        the same whichever rank does; for strategies that remember something for each.
        """

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """A gradient of the present pass is complete, and is the strategy's to keep.

        Args:
            slot: which of the parameters that `start` was given.
            gradient: like that parameter; dense or sparse.

        Raises:
            WorkerError: it is the second of the pass, and the first is on its way.
        """

    def exchange(self, notes: Tensor) -> Tensor | None:
        """This rank's passes are done: talk with the others. Parameters do not move.

        Args:
            notes: [notes] float64 on the CPU, whatever the roles want summed.

        Returns:
            The notes, summed over the ranks (to about 1e-7 relative; where
            there are `parts`, to that of float64), the same bits on each.

            Or None, on every rank, where there are `parts`: the same passes
            must run once more. It takes no more than one repetition.

        Raises:
            PeerError: a rank went away; `abandon` comes next.
        """

    def prepare(self, step: int, scale: float) -> float:
        """All want the step: do what needs others before `apply`. Parameters do not move.

        Args:
            step: its number.
            scale: what the agreed gradient is to be multiplied by.

        Returns:
            What the gradients that `hand_out` gives are still to be multiplied by.

        Raises:
            PeerError: a rank went away. The step may still happen, if others are through.
        """

    def hand_out(self) -> None:
        """The step happens: give each parameter the agreed gradient as its `.grad`, or None where
        no rank had one. With servers, only they have it."""

    def apply(self, update: Callable[[], Result]) -> Result | None:
        """After `hand_out`: call `update`, which moves parameters, take the gradients away, and
        make what was staged the state of this commit.

        Nothing is exchanged, and what is raised ends this process.

        Returns:
            What `update` gave, the last time that it was called; None where it was not, since
            no gradient was due.
        """

    def abandon(self) -> None:
        """The step does not happen: forget its gradients, and what they have taught.

        Another may follow where `exchange` has returned; after a PeerError comes `stop`.
        """

    def stop(self) -> None:
        """The generation is over: let go of the group. What is staged stays staged until `apply`
        or `abandon`. A second call does nothing."""

    def state(self) -> dict[str, Tensor]:
        """What is the same on every rank after a commit, by name; empty without memory."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, between `stop` and `start`; nothing is staged."""

    def own_state(self) -> dict[str, Tensor]:
        """What this rank alone remembers since the last commit, as `KIND/SLOT`: a kind of `laws`
        and the number of the parameter that it belongs to; shaped like that parameter. What
        moves is named `KIND/SLOT/NAME/START:STOP`, and is of that part of the parameter."""

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave, here or elsewhere, in place of what is remembered;
        between `stop` and `start`."""

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """The same, from the memory of a process that is gone.

        Args:
            tensors: what lies there, as of the last commit.
            parameters: as for `start`.
            holders: as in `InMesh`, on a mesh.
        """

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """What a step costs each rank.

        Args:
            parameter_bytes: of all parameters, and four for each row of those with sparse
                gradients.
            replicas: how many there are.
        """


class NothingOfItsOwn:
    """To inherit from, for strategies whose ranks all remember the same: they need no vote."""

    laws: Mapping[str, Law] = {}

    start_in_doubt = -1

    def resolve(self, generation: int) -> None:
        """Nothing changes hands."""

    def begin_step(self, attempt: Attempt) -> None:
        """One step is like another."""

    def prepare(self, step: int, scale: float) -> float:
        """`exchange` did it all."""
        return scale

    def own_state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take up."""

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Nothing was left."""


def strategy_of(sync: SyncSpec, seed: int = 0) -> Strategy:
    """As `make_strategy`, of a job with this seed."""
    return make_strategy(sync.name, sync.all_options, sync.codec, sync.all_codec_options, seed)


def make_strategy(
    name: str,
    options: Mapping[str, Any],
    codec: str = "none",
    codec_options: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
) -> Strategy:
    """A strategy by its name in the job file, with its options checked, and its codec's.

    Raises:
        SpecError: there is no such strategy or codec, or it has no such option, or the
            option's value is refused; or the strategy has no use for the codec.
    """
    row = STRATEGY_ROWS.get(name, UNKNOWN)
    beside = row.round_options
    if row.rounds is not None and not row.fragments:  # defaults are written down with them
        options = {k: v for k, v in options.items() if k not in OF_FRAGMENTS}
    factory = STRATEGIES.factory(
        name, options, where="sync.options", apart=["codec"], beside=sorted(beside)
    )
    of_strategy = inspect.signature(factory).parameters
    options = {
        option: value
        for option, value in options.items()
        if option in of_strategy or option not in beside
    }
    coder = CODECS.factory(codec, codec_options, where="sync.codec_options", apart=["seed"])
    seeds = {"seed": seed} if "seed" in inspect.signature(coder).parameters else {}
    made = coder(**codec_options, **seeds)
    if hasattr(made, "reduce") and not hasattr(made, "reducer"):
        made.reducer = "hook"
    if missing := [
        part for part in OWN if not hasattr(made, part) and not hasattr(made, "reducer")
    ]:
        raise SpecError(
            f"sync.codec = {codec!r} lacks {', '.join(missing)}. A codec has all of "
            f"{', '.join(OWN)}, or `reduce`: see the guide on adding a codec."
        )
    if codec == "none":
        return cast(Strategy, factory(**options))
    if "codec" not in of_strategy:
        raise SpecError(f"sync.codec = {codec!r}: {name} sends plain numbers. Leave it out.")
    return cast(Strategy, factory(**options, codec=made))
