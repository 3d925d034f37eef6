"""Names of a pool's jobs: no job is taken for another one, or another run for a job's."""

import pytest

from instep.errors import SpecError
from instep.pool.flow_submit import submit_flow
from instep.pool.jobs import PoolJob, PoolSpec
from instep.pool.local_runs import LocalRuns
from instep.pool.pool_file import PoolFolder
from instep.pool.requests import claim_key
from instep.pool.scheduler import JobSight
from instep.pool.submit import submit
from made_up_runs import make_run
from made_up_searches import make_search


@pytest.fixture
def pool(tmp_path):
    found = PoolFolder(tmp_path / "pool")
    found.make(PoolSpec(cores=4))
    (tmp_path / "recipe.py").touch()
    for name in ("net", "other", "f-train", "f-say"):
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\nrecipe = "recipe.py:recipe"\n')
    flow = '[job.train]\nfile = "net.toml"\n[job.say]\ncommand = ["echo"]\n'
    (tmp_path / "f.toml").write_text(flow)
    return found


def test_a_key_that_another_job_has_or_that_makes_its_name_is_refused(tmp_path, pool):
    net, other = tmp_path / "net.toml", tmp_path / "other.toml"
    assert submit(pool, net, key="k")[:2] == ("net-k", True)
    assert submit(pool, net, key="k")[:2] == ("net-k", False)
    with pytest.raises(SpecError, match="'k': net-k has it, and this job would be other-k"):
        submit(pool, other, key="k")
    assert [submit(pool, net).id for _ in range(2)] == ["net", "net-2"]
    with pytest.raises(SpecError, match="'2': the pool has another job that is called net-2"):
        submit(pool, net, key="2")
    assert [*pool.state().jobs] == ["net-k", "net", "net-2"]


def test_of_two_jobs_that_are_submitted_with_one_key_at_one_moment_one_has_it(tmp_path, pool):
    none = pool.state().jobs  # as the other command saw it too
    assert submit(pool, tmp_path / "net.toml", key="k").new
    with pytest.raises(SpecError, match="'k': net-k has it, and this job would be other-k"):
        claim_key(pool.jobs, "k", "other-k", none)
    claim_key(pool.jobs, "k", "net-k", none)


def test_a_flow_and_a_job_of_the_same_name_both_come(tmp_path, pool):
    submit(pool, tmp_path / "f-train.toml")
    before = (pool.jobs / "f-train.toml").read_text()
    assert submit_flow(pool, tmp_path / "f.toml").jobs == ("f-2-train", "f-2-say")
    assert (pool.jobs / "f-train.toml").read_text() == before
    assert submit(pool, tmp_path / "f-say.toml").id == "f-say"
    assert submit(pool, tmp_path / "net.toml", ["name=f-2-say"]).id == "f-2-say-2"
    submit(pool, tmp_path / "net.toml", ["name=f-k-say"])
    with pytest.raises(SpecError, match=r"another job that is called f-k-say\. Give another"):
        submit_flow(pool, tmp_path / "f.toml", key="k")
    assert len(pool.state().jobs) == 6


def test_a_run_that_somebody_else_has_made_is_not_taken_for_that_of_a_job(pool):
    make_run(pool.runs / "net")
    make_search(pool.runs / "many")
    hands = LocalRuns(pool.jobs, pool.runs, lambda *words: pytest.fail("started"))
    for id, kind in (("net", "run"), ("many", "search")):
        job = PoolJob(id=id, share="a", at_least=1, at_most=1, kind=kind, target=1)
        hands.start(job)
        sight = hands.look(job)
        assert (sight.outcome, sight.step) == ("failed", 0)
        assert "was there before this pool has started it" in sight.why
        (pool.jobs / f"{id}.log").touch()  # its client has begun
        assert hands.look(job) != sight
    assert hands.look(PoolJob(id="new", share="a", at_least=1, at_most=1)) == JobSight(False)


def test_a_search_whose_trials_keep_their_workers_has_room_for_whole_trials(tmp_path, pool):
    text = 'recipe = "recipe.py:recipe"\nworkers = 2\n[train]\nmicro_batches = 8\n{}'
    text += "[search]\nwidth = 3\n[search.space]\nseed = [1, 2, 3, 4]\n"
    path = tmp_path / "search.toml"
    for determinism, expected in (("", (1, 24, 1)), ('determinism = "order"\n', (2, 6, 2))):
        path.write_text(text.format(determinism))
        id = submit(pool, path).id
        job = pool.state().jobs[id]
        assert (job.at_least, job.at_most, job.unit) == expected
    with pytest.raises(SpecError, match="1 to 6 workers, in multiples of 2"):
        submit(pool, path, at_least=3)
