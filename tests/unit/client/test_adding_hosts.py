"""A Slurm job that adds its nodes to a run: what it does where the run's master is silent."""

import threading

import pytest

from instep import spec_file
from instep.client import running
from instep.client.join_run import _add
from instep.comm.channel import LARGEST
from instep.comm.endpoint import Switchboard
from instep.comm.messages import AddHosts, Hello, Welcome
from instep.errors import RunError


def test_a_master_that_stops_answering_is_not_waited_for(tmp_path, monkeypatch):
    """It was stopped, or cut off: the connection stays open."""
    monkeypatch.setattr(running, "ANSWER_S", 1.0)
    job = spec_file.build({"recipe": "/gone/a.py:f"}, source="a test")
    (tmp_path / "job.toml").write_text(spec_file.dump(job))
    board, asked = Switchboard(), threading.Event()

    def welcome():
        while not asked.is_set():
            for peer, message in board.hub.receive(0.05):
                peer.frames.largest = LARGEST
                if isinstance(message, Hello):
                    board.hub.send(peer, Welcome(job="", run="", started=0.0))
                elif isinstance(message, AddHosts):
                    asked.set()

    master = threading.Thread(target=welcome, daemon=True)
    master.start()
    try:
        with running.published(tmp_path, board.endpoint), pytest.raises(RunError, match="is not"):
            _add(tmp_path, 1, 1)
        assert asked.is_set()
    finally:
        asked.set()
        master.join()
        board.close()
