"""What one worker alone has: from the strategy to checkpoints and to host memory, and back.

What it is, the strategy knows, and calls it by the numbers of its parameters; here they have
names. When it counts follows from the commits that all agree on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.engine.member import Member
from instep.engine.state.committed import CommittedState
from instep.engine.turns import TurnState
from instep.records import Attempt, Law
from instep.system.host_memory import HostMemory


class OwnState:
    """Of one worker, whose step has one turn; with several there is none.

    Args:
        member: this worker's membership in the run.
        state: which commits happened.
        model: has the parameters.
        turn: with the strategy.
    """

    def __init__(
        self, member: Member, state: CommittedState, model: nn.Module, turn: TurnState
    ) -> None:
        self._member, self._state, self._strategy = member, state, turn.strategy
        self._slots, self._holders = turn.slots, turn.holders
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [names[id(parameter)] for parameter in turn.parameters]
        self.memory = HostMemory() if turn.strategy.laws else None
        """Keeps it, should this process be killed."""

    def summed(self, comm: Comm) -> dict[str, Tensor]:
        """What is a part of a sum over the ranks of a group, added up on rank 0, as
        `KIND/PARAMETER`; all of them call it, and what others get is of no use.

        What one rank alone has, as what a participant remembers, goes straight to rank 0.

        Raises:
            PeerError: one of them went away meanwhile.
        """
        own = dict(sorted(self._named(Law.SUM).items()))
        if comm.size == 1 or not own:
            return own
        device = next(iter(own.values())).device
        has = torch.zeros(comm.size, len(own), device=device)
        has[comm.rank] = torch.tensor([float(bool(each.any())) for each in own.values()])
        comm.all_reduce(has).wait()
        for (name, mine), holds in zip(own.items(), has.T.tolist(), strict=True):
            holders = [rank for rank, there in enumerate(holds) if there]
            if len(holders) > 1:
                comm.all_reduce(mine).wait()
            elif holders == [comm.rank] and comm.rank:
                comm.send(mine.contiguous(), 0).wait()
            elif holders and holders != [0] and not comm.rank:
                own[name] = mine.contiguous()
                comm.receive(own[name], holders[0]).wait()
        return own

    def shard(self) -> dict[str, Tensor]:
        """What moves with its holder: a server's part of the optimizer's state, as
        `PARAMETER/NAME/START:STOP`."""
        return {name.split("/", 1)[1]: tensor for name, tensor in self._named(Law.MOVE).items()}

    def _named(self, law: Law) -> dict[str, Tensor]:
        """The strategy's own state under a law, by the parameters' names."""
        own = self._strategy.own_state()
        kinds = [name.split("/", 2) for name in own]
        return {
            "/".join((kind, self._names[int(slot)], *more)): tensor
            for (kind, slot, *more), tensor in zip(kinds, own.values(), strict=True)
            if self._strategy.laws[kind] is law
        }

    def load(self, named: Mapping[str, Tensor]) -> None:
        """Take up what `summed` gave, in place of what there is."""
        slots = {name: slot for slot, name in enumerate(self._names)}
        kinds = [name.split("/", 1) for name in named]
        self._strategy.load_own(
            {
                f"{kind}/{slots[name]}": total
                for (kind, name), total in zip(kinds, named.values(), strict=True)
            }
        )

    def take_what_was_left(self) -> None:
        """This process takes the place of another: what that one alone had lies in memory."""
        if self.memory is None:
            return
        state, taken = self._state, False
        for stamp in self.memory.stamps():
            # of an older commit where its process was replaced on another host meanwhile
            newest = stamp[:2] == (state.progress.course, state.number)
            counts = newest and state.happened(Attempt(*stamp))
            # the newest: one before it is of before others handed theirs over
            left = self.memory.at(*stamp) if counts and not taken else None
            if left is not None:
                self._strategy.load_left(left, self._slots, self._holders)
                taken = True
            else:
                self.memory.forget(*stamp)
        number = self._member.number
        lasts = Law.SUM in self._strategy.laws.values()
        if lasts and not taken and number in state.owners:
            self._member.emit(
                "warning",
                text=f"worker {number}: the memory that its last process left on its host is gone "
                "or damaged. What only that one had is lost: gradients still to be sent, and kept "
                "states of participants' optimizers or voters.",
            )
