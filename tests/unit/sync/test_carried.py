"""What participants remember, where the rank that held it is lost."""

import torch

from instep.comm.memory import run_ranks
from instep.records import BEGINNING, Attempt
from instep.sync.rounds.carried import Carried, CarriedPiece, kept_of


def test_what_nobody_holds_any_more_is_in_no_later_state():
    """Else a checkpoint would hold zeros in its place, and a resume take them for a state."""

    def body(comm):
        carried = Carried()
        carried.load_state({"made": torch.tensor([(0, 3, 4), (1, 3, 4), (2, 2, 4)])})
        if comm.rank == 0:
            carried.held = {CarriedPiece(kept_of(0), 0, 4, 3): torch.ones(4)}
        carried.start(comm, torch.device("cpu"), None, BEGINNING, (), 0)
        found, _ = carried.fetch([comm.rank])
        assert found.keys() == ({0} if comm.rank == 0 else set())
        carried.stage(Attempt(0, 4, 1), [CarriedPiece(kept_of(0), 0, 4, 4)], {0: 4}, {0: 4})
        carried.abandon()
        assert (carried.made.keys(), carried.lost) == ({0, 1, 2}, {})
        carried.stage(Attempt(0, 4, 1), [CarriedPiece(kept_of(0), 0, 4, 4)], {0: 4}, {0: 4})
        carried.apply()
        assert carried.lost == {1: 3, 2: 2}
        assert carried.state()["made"].tolist() == [[0, 4, 4]]

    run_ranks(2, body)
