"""A recipe defined in a cell of a notebook trains, in a real kernel, on forks of that."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from lazily import Lazy, needs

manager = Lazy("jupyter_client.manager")

pytestmark = [pytest.mark.process, needs("jupyter_client"), needs("ipykernel")]

RECIPE = """
import time, torch, instep
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(2)
(torch.ones(600, 600) @ torch.ones(600, 600)).sum()  # torch's threads have started in the kernel
torch.nn.Linear(500, 500)(torch.ones(5000, 500)).sum().backward()

class Waiting(nn.Module):
    def forward(self, x):
        time.sleep(pause_s)
        return x + 0 * (torch.ones(600, 600) @ torch.ones(600, 600)).sum()  # on torch's threads

def recipe():
    x = torch.randn(400, 8)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(8, 2), Waiting()),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(x, (x[:, 0] > 0).long()),
    )
"""
TRAIN = "run = instep.train(recipe, workers=2, train={'epochs': 2, 'global_batch': 40})"


@pytest.fixture
def kernel(tmp_path):
    started = Kernel(tmp_path)
    yield started
    started.close()


class Kernel:
    """A kernel, and what its cells show."""

    def __init__(self, folder):
        self.folder = folder
        self._manager, self._client = manager.start_new_kernel(cwd=str(folder))
        self.process = psutil.Process(self._manager.provisioner.pid)
        self._asked = ""

    def begins(self, code):
        """Run a cell; what it shows comes later."""
        self._asked = self._client.execute(code)

    def shows(self, until=None):
        """The messages of the cell, up to one that has such a text; or all."""
        messages = []
        while True:
            message = self._client.get_iopub_msg(timeout=100)
            if message["parent_header"].get("msg_id") != self._asked:
                continue
            kind, content = message["msg_type"], message["content"]
            assert kind != "error", "\n".join(content["traceback"])
            if kind == "status" and content["execution_state"] == "idle":
                assert until is None, f"the cell ended without {until!r}: {messages}"
                return messages
            messages.append((kind, content))
            if until is not None and until in str(content):
                return messages

    def run(self, code):
        self.begins(code)
        return self.shows()

    def text(self, code):
        """The value of an expression."""
        return next(
            c["data"]["text/plain"] for kind, c in self.run(code) if kind == "execute_result"
        )

    def interrupt(self):
        self._manager.interrupt_kernel()

    def processes(self, name):
        """Of the run: forked from the kernel, or by what was."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [each for each in self.process.children(True) if each.name() == name]
        return []

    def close(self):
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def until(there, what):
    deadline = time.monotonic() + 600
    while not there():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


@pytest.mark.tail
def test_a_recipe_of_a_cell_trains_with_a_table_there_and_its_report_below(kernel):
    kernel.run("pause_s = 0.05" + RECIPE)
    shown = kernel.run(TRAIN + "\nrun")
    (first,) = [c for kind, c in shown if kind == "display_data"]
    updates = [c for kind, c in shown if kind == "update_display_data"]
    assert updates
    assert all(each["transient"] == first["transient"] for each in updates)
    assert "/20" in updates[-2]["data"]["text/html"]
    assert "<pre>done in" in updates[-1]["data"]["text/html"]
    assert [c for kind, c in shown if kind == "stream"] == []
    (page,) = [c["data"]["text/html"] for kind, c in shown if kind == "execute_result"]
    assert "done in" in page
    assert '<iframe srcdoc="&lt;!doctype html' in page.lower()
    assert kernel.text("run.summary['outcome'], run.summary['steps']") == "('completed', 20)"
    assert kernel.processes("instep-worker") == []


@pytest.mark.slow
def test_a_worker_that_is_killed_is_forked_again_with_the_recipe_of_the_cell(kernel):
    kernel.run("pause_s = 0.1" + RECIPE)
    kernel.begins(TRAIN)
    kernel.shows(until="/20")
    kernel.processes("instep-worker")[0].kill()
    kernel.shows()
    assert kernel.text("run.summary['outcome'], run.summary['steps']") == "('completed', 20)"
    events = (kernel.folder / "runs/recipe/events.jsonl").read_text().splitlines()
    assert sum('"worker_joined"' in line for line in events) == 3


@pytest.mark.slow
def test_an_interrupt_stops_at_the_next_commit_and_the_cell_can_resume(kernel):
    kernel.run("pause_s = 0.1" + RECIPE)
    kernel.begins(TRAIN)
    kernel.shows(until="/20")
    kernel.interrupt()
    kernel.shows()
    assert kernel.text("run.summary['outcome'], run.exit_code") == "('interrupted', 130)"
    kernel.run("pause_s = 0\nrun = instep.resume(run.path, recipe=recipe, workers=1)")
    assert kernel.text("run.summary['outcome'], run.summary['steps']") == "('completed', 20)"


@pytest.mark.slow
def test_a_kernel_that_is_killed_leaves_no_process(kernel):
    kernel.run("pause_s = 0.2" + RECIPE)
    kernel.begins(TRAIN)
    kernel.shows(until="/20")
    left = kernel.process.children(recursive=True)
    assert len(left) >= 4  # master, fork server, workers
    os.kill(kernel.process.pid, signal.SIGKILL)
    until(lambda: not any(_lives(each) for each in left), "end of the run's processes")


def _lives(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
