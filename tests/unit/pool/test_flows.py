"""A flow is refused if it can never be right, ends with its cause, runs again where it failed."""

import pytest

from instep.errors import RunError, SpecError, WorkerError
from instep.pool.decide import decide
from instep.pool.flow_file import flow_of, is_flow
from instep.pool.flow_submit import run_again, submit_flow
from instep.pool.jobs import (
    AgainAsked,
    CancelAsked,
    ClientEnded,
    FlowNeeds,
    FlowSubmitted,
    HostSpec,
    PoolJob,
    PoolSpec,
    PoolState,
    ResultTest,
)
from instep.pool.pool_file import PoolFolder, pool_of
from instep.pool.pool_journal import PoolJournal
from instep.pool.requests import pending
from instep.pool.view import explanation, job_lines


def job(name, after=(), outcome="completed", tests=(), **more):
    needs = FlowNeeds(tuple(after), outcome, tuple(tests)) if after else None
    return PoolJob(id=name, share="a", at_least=1, at_most=1, flow="f", needs=needs, **more)


def flow(*jobs, cores=4):
    return decide(PoolState(cores=cores), FlowSubmitted("f", jobs), 1.0)


def status(state):
    return {each.id: each.outcome or each.status for each in state.jobs.values()}


GOOD = ResultTest("train", "metrics.accuracy", ">=", 0.95)


def test_a_job_runs_once_those_before_it_have_completed_and_what_it_needs_of_them_is_there():
    state = flow(job("prepare"), job("train", ["prepare"]), job("deploy", ["train"], tests=[GOOD]))
    assert status(state) == {"prepare": "running", "train": "waiting", "deploy": "waiting"}
    assert "prepare" in explanation(state, state.jobs["train"], 2.0)[1]
    state = decide(state, ClientEnded("prepare", "completed"), 2.0)
    assert status(state)["train"] == "running"
    good = decide(state, ClientEnded("train", "completed", results={"metrics.accuracy": 0.96}), 3.0)
    assert status(good)["deploy"] == "running"
    bad = decide(state, ClientEnded("train", "completed", results={"metrics.accuracy": 0.94}), 3.0)
    assert (bad.jobs["deploy"].outcome, bad.jobs["deploy"].why) == (
        "skipped",
        "metrics.accuracy of train is 0.94, not >= 0.95",
    )


def test_what_can_never_be_met_ends_at_once_with_its_cause_and_what_follows_it_too():
    state = flow(
        job("a"),
        job("slow"),
        job("b", ["a", "slow"]),
        job("c", ["b"]),
        job("mourn", ["a", "b"], "failed"),
        job("sweep", ["a", "c"], "ended"),
        job("cheer", ["slow"], "failed"),
    )
    state = decide(state, ClientEnded("a", "failed"), 2.0)
    told = status(state)
    assert (told["b"], told["c"], told["mourn"], told["sweep"]) == (
        "skipped",
        "skipped",
        "running",
        "running",
    )
    assert (state.jobs["b"].why, state.jobs["c"].why) == ("a is failed", "b is skipped")
    state = decide(state, ClientEnded("slow", "completed"), 3.0)
    assert (status(state)["cheer"], state.jobs["cheer"].why) == (
        "skipped",
        "nothing before it has failed",
    )
    cancelled = decide(flow(job("a"), job("b", ["a"])), CancelAsked("b"), 2.0)
    assert status(cancelled)["b"] == "cancelled"


def test_again_runs_what_has_not_completed_and_nothing_else():
    state = flow(job("a"), job("b", ["a"]), job("c", ["b"]))
    state = decide(state, ClientEnded("a", "completed"), 2.0)
    state = decide(state, ClientEnded("b", "failed", "no room"), 3.0)
    state = decide(state, AgainAsked(("a", "b", "c")), 4.0)
    assert status(state) == {"a": "completed", "b": "running", "c": "waiting"}
    assert [state.jobs[name].attempt for name in "abc"] == [1, 2, 2]
    state = decide(state, ClientEnded("b", "completed"), 5.0)
    state = decide(state, ClientEnded("c", "completed"), 6.0)
    assert {*status(state).values()} == {"completed"}


def test_a_command_that_runs_keeps_its_core_whoever_comes():
    state = flow(job("command", kind="command", fixed=True), cores=1)
    urgent = PoolJob(id="urgent", share="a", at_least=1, at_most=1, priority=9)
    state = decide(state, FlowSubmitted("g", (urgent,)), 2.0)
    assert status(state) == {"command": "running", "urgent": "waiting"}


def test_files_of_flows_and_pools_are_read_as_job_files_are(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b'\xef\xbb\xbf[job.a]\ncommand = ["x"]\n')  # a byte order mark
    assert is_flow(path)
    assert [*flow_of(path).job] == ["a"]
    path.write_bytes(b"\xef\xbb\xbfcores = 3\n")
    assert pool_of(path).cores == 3
    for text, wanted in (
        ("é = 1".encode("latin-1"), "save it as UTF-8"),
        (b"a = " + 40 * b"[" + 40 * b"]", "32 deep"),
        (b"a = ", "not valid TOML"),
        (b"cores = 'many'", r"is not the file of a (flow|pool): "),
    ):
        path.write_bytes(text)
        for read in (flow_of, pool_of):
            with pytest.raises(SpecError, match=wanted):
                read(path)
    assert not is_flow(path)
    for read, what in ((flow_of, "flow"), (pool_of, "pool")):
        with pytest.raises(SpecError, match=f"there is no {what} file .* Did you mean 'a.toml'"):
            read(tmp_path / "aa.toml")


WRONG = {
    "no.toml": ("", "has no job"),
    "circle": (
        '[job.a]\ncommand = ["x"]\nafter = ["b"]\n[job.b]\ncommand = ["x"]\nafter = ["a"]',
        "circle: . after . after .",
    ),
    "unknown": ('[job.a]\ncommand = ["x"]\n[job.b]\ncommand = ["x"]\nafter = ["aa"]', "mean 'a'"),
    "both": ('[job.a]\ncommand = ["x"]\nfile = "y.toml"', "one of them"),
    "when": ('[job.a]\ncommand = ["x"]\n[job.b]\ncommand=["x"]\nafter=["a"]\nwhen="a"', "such as"),
    "not after": (
        '[job.a]\ncommand = ["x"]\n[job.c]\ncommand = ["x"]\n'
        '[job.b]\ncommand=["x"]\nafter=["a"]\nwhen="c.seconds > 1"',
        "not one of its `after`",
    ),
    "of a command": (
        '[job.a]\ncommand = ["x"]\n[job.b]\ncommand=["x"]\nafter=["a"]\nwhen="a.metrics.x > 1"',
        "a reports no 'metrics.x'",
    ),
    "infinite": (
        '[job.a]\ncommand = ["x"]\n[job.b]\ncommand=["x"]\nafter=["a"]\nwhen="a.seconds < inf"',
        "such as",
    ),
    "nul": ('[job.a]\ncommand = ["x", "a\\u0000"]', "a NUL character"),
    "long": (f'[job.{81 * "a"}]\ncommand = ["x"]', "80 at most"),
    "key": ('[job.a]\ncommand = ["x"]\nbefore = ["b"]', "before"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_flow_that_can_never_be_right_is_refused(tmp_path, name):
    text, wanted = WRONG[name]
    path = tmp_path / "flow.toml"
    path.write_text(text or "[job]\n")
    assert is_flow(path)
    with pytest.raises(SpecError, match=wanted):
        flow_of(path)


RECIPE = """
import instep, torch
from torch import nn

def recipe():
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.zeros(8).long())
    return instep.Recipe(
        model=nn.Linear(3, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=data,
        validate=data,
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).mean()},
    )
"""

FLOW = """
[job.prepare]
command = ["python", "prepare.py"]
[job.train]
file = "job.toml"
set = ["train.epochs=2"]
after = ["prepare"]
[job.deploy]
command = ["sh", "push.sh", "{train}"]
after = ["train"]
when = "train.metrics.accuracy >= 0.95 and train.loss < 1"
"""


@pytest.fixture
def pool(tmp_path):
    found = PoolFolder(tmp_path / "pool")
    found.make(PoolSpec(cores=2))
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "job.toml").write_text('recipe = "recipe.py:recipe"\n[train]\nglobal_batch = 8\n')
    (tmp_path / "nightly.toml").write_text(FLOW)
    return found


def test_a_flow_comes_in_one_request_and_a_metric_that_nobody_reports_in_none(tmp_path, pool):
    path = tmp_path / "nightly.toml"
    sent = submit_flow(pool, path, key="17")
    assert sent.name == "nightly-17"
    ((_, request),) = pending(pool.folder)
    prepare, train, deploy = request.jobs
    assert (prepare.kind, train.kind, deploy.kind) == ("command", "run", "command")
    assert deploy.command[2] == str(pool.runs / "nightly-17-train")
    assert [test.value for test in deploy.needs.tests] == [0.95, 1.0]
    assert "epochs = 2" in (pool.jobs / "nightly-17-train.toml").read_text()
    assert submit_flow(pool, path, key="17") == sent._replace(new=False)
    assert len([*pending(pool.folder)]) == 1
    assert submit_flow(pool, path).name == "nightly"
    assert submit_flow(pool, path).name == "nightly-2"
    path.write_text(FLOW.replace("accuracy", "acuracy"))
    with pytest.raises(SpecError, match=r"of train reports 'acuracy'\. Did you mean 'accuracy'"):
        submit_flow(pool, path)
    path.write_text(FLOW.replace("file = ", "at_least = 99\nfile = "))
    with pytest.raises(SpecError, match=r"\[job.train\] at_least = 99: "):
        submit_flow(pool, path)
    assert not (pool.jobs / "nightly-3.flow").exists()  # what is refused takes no name
    path.write_text(FLOW)
    (tmp_path / "bad.py").write_text("def recipe():\n    raise ValueError('no data')\n")
    (tmp_path / "job.toml").write_text('recipe = "bad.py:recipe"\n[train]\nglobal_batch = 8\n')
    with pytest.raises(WorkerError, match=r"\[job.train\]: .* ValueError: no data \(.*bad.py:2"):
        submit_flow(pool, path)
    assert len([*pending(pool.folder)]) == 3
    assert [line.split()[0] for line in job_lines(pool.state(), 1.0)][1:4] == [*sent.jobs]


def test_a_recipe_that_ends_the_process_does_not_end_submit_as_if_all_were_well(tmp_path, pool):
    (tmp_path / "recipe.py").write_text("def recipe():\n    raise SystemExit(0)\n")
    with pytest.raises(WorkerError, match=r"its recipe raised SystemExit: 0 \(.*recipe.py:2"):
        submit_flow(pool, tmp_path / "nightly.toml")
    assert not [*pending(pool.folder)]


def test_the_memory_of_a_flows_job_is_counted_on_hosts_and_refused_where_there_are_none(
    tmp_path, pool
):
    path = tmp_path / "heavy.toml"
    text = '[job.train]\nfile = "job.toml"\nmemory = "{}"\n'
    path.write_text(text.format("4GB"))
    with pytest.raises(SpecError, match=r"\[job.train\] memory: this pool has no hosts"):
        submit_flow(pool, path)
    hosted = PoolFolder(tmp_path / "hosted")
    host = HostSpec(cores=2, memory="8GB")
    hosted.make(PoolSpec(listen="h:1", hosts={"a": host}))
    submit_flow(hosted, path)
    assert hosted.state().jobs["heavy-train"].memory == 4_000_000_000
    path.write_text(text.format("9GB"))
    with pytest.raises(SpecError, match=r"\[job.train\] memory 9.0 GB: the hosts have room for 0"):
        submit_flow(hosted, path)
    path.write_text(text.format("much"))
    with pytest.raises(SpecError, match=r"\[job.train\] memory: 'much' is no size"):
        flow_of(path)


def test_again_needs_a_flow_that_has_failed_and_the_same_jobs(tmp_path, pool):
    path = tmp_path / "nightly.toml"
    with pytest.raises(RunError, match="no flow 'nightly' yet"):
        run_again(pool, path)
    sent = submit_flow(pool, path)
    journal, state = PoolJournal(pool.folder, write=True), pool.empty
    ((file, request),) = pending(pool.folder)
    for event in (request, ClientEnded("nightly-prepare", "failed")):
        before, state = state, decide(state, event, 1.0)
        journal.write(event, before, state)
    file.unlink()
    assert pool.state() == state
    assert run_again(pool, path).jobs == sent.jobs
    (tmp_path / "job.toml").write_text('recipe = "recipe.py:recipe"\n[train]\nglobal_batch = 16\n')
    with pytest.raises(SpecError, match="train is another job now"):
        run_again(pool, path)
    journal.close()
