"""Ranks of a crew agree on how many steps there is time for, whatever each saw of its own."""

import pytest
import torch

from instep.comm.memory import MemoryComm, _Room, run_ranks
from instep.lab.plan.rank import LEAST, MOST, WARM_MORE, WARM_S, Rank
from instep.lab.plan.rehearsed_steps import RehearsedSteps, StepTimes


class NotingComm:
    """A group that notes of which type this rank's tensors are."""

    def __init__(self, comm: MemoryComm, kinds: set[torch.dtype]) -> None:
        self._comm, self._kinds, self.size = comm, kinds, comm.size

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._kinds.add(tensor.dtype)
        self._comm.broadcast(tensor, root)


@pytest.mark.parametrize("seconds", [(0.07, 9.0, 1e-9), (9.0, 0.07, 0.0), (1e-9, 0.07, 9.0)])
def test_what_a_rank_tells_is_of_one_type_however_long_its_steps_were(
    seconds: tuple[float, ...],
) -> None:
    kinds = set[torch.dtype]()

    def count(comm: MemoryComm) -> int:
        return Rank._agreed_count(NotingComm(comm, kinds), 1.0, seconds[comm.rank], LEAST, MOST)

    expected = min(MOST, max(LEAST, int(1.0 / seconds[0])))
    assert run_ranks(3, count) == [expected] * 3
    assert len(kinds) == 1


def test_a_step_that_is_longer_than_the_time_to_get_warm_is_not_taken_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such crews failed: none of their further steps was to have an end."""
    alone = NotingComm(MemoryComm(_Room(1), 0), set())
    assert Rank._agreed_count(alone, WARM_S, 1.01 * WARM_S, 0, WARM_MORE) == 0
    steps = RehearsedSteps.__new__(RehearsedSteps)
    monkeypatch.setattr(RehearsedSteps, "step", lambda self: StepTimes(0.0, 0.0, 0.0, 0.0, 0.0))
    assert [len(steps.steps(count)) for count in (0, 1, 3)] == [0, 1, 3]
