"""An exchange that is given up within a message: gloo does not wake who waits for the rest."""

import subprocess
import sys
from pathlib import Path

import pytest
from started import RECIPES

from instep.lab import netlab

NO = netlab.why_not()
pytestmark = [pytest.mark.process, pytest.mark.skipif(NO is not None, reason=str(NO))]


@pytest.mark.slow
def test_a_worker_with_part_of_a_message_leaves_the_group_when_it_is_abandoned(
    tmp_path: Path,
) -> None:
    moments = ["1.0", "1.2", "1.4"]  # most of them within the last message of a round
    with netlab.Network(2 * len(moments), rate="1mbit") as network:
        ranks = []
        for number, host in enumerate(network.hosts):
            rank, moment = number % 2, moments[number // 2]
            place = [network.address(host), str(tmp_path / moment), moment]
            command = [sys.executable, str(RECIPES / "gives_up.py"), str(rank), *place]
            ranks.append(network.run(host, command, stdout=subprocess.PIPE, text=True))
        said = [rank.communicate(timeout=600)[0] for rank in ranks[::2]]
        for other in ranks[1::2]:  # nobody tells these to give up
            other.kill()
            other.communicate()
    assert said == ["left\n"] * len(moments)
