"""Who hangs, told from what workers show, on a clock that the test turns."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.comm.protocol.messages import Heartbeat
from instep.control.seen import OF_A_STEP, WAITING
from instep.control.watch import SILENT_S, Watch
from instep.system.limits import FLOOR_S, STEPS, UNKNOWN_S

BEAT_S = 0.2


class Shown:
    """A watch, and workers that show themselves to it."""

    def __init__(self, *workers, step_s=0.05):
        self.watch, self.now = Watch(), 100.0
        self.workers = {
            worker: Heartbeat(step=1, phase="forward", progress=0) for worker in workers
        }
        for worker in workers:
            self.watch.begins(worker, self.now)
        self.goes_on(3)
        if step_s:
            for worker in workers:
                self.watch.commits(worker, 10, step_s)
            self.goes_on(3)

    def goes_on(self, beats, *, but=(), frozen=(), silent=(), share=0.0):
        """Everybody gets something done and says so, except these.

        Who is frozen has a processor for this share of the time.
        """
        for _ in range(beats):
            self.now += BEAT_S
            self.watch.turn(self.now)
            for worker, heartbeat in self.workers.items():
                if worker in silent:
                    continue
                if worker in frozen:
                    heartbeat = msgspec.structs.replace(
                        heartbeat, cpu_s=heartbeat.cpu_s + share * BEAT_S
                    )
                elif worker not in but:
                    heartbeat = msgspec.structs.replace(heartbeat, progress=heartbeat.progress + 1)
                self.workers[worker] = heartbeat
                self.watch.heartbeat(worker, heartbeat, self.now)

    def at(self, worker, phase):
        self.workers[worker] = msgspec.structs.replace(self.workers[worker], phase=phase)

    def reads(self, worker, seconds, *, times=0, share=1.0):
        """A worker reads a sample that takes so long, and is asked about at every beat.

        Returns how long it was given: all that it takes, or the time at which it was named.
        """
        self.at(worker, "loading")
        began = self.now
        while self.now - began < seconds:
            self.goes_on(1, frozen=[worker], share=share)
            if self.hangs({worker: times}):
                assert self.hangs({worker: times}) == [(worker, "loading")]
                return self.now - began
        self.at(worker, "forward")
        self.goes_on(2)
        return seconds

    def replaced(self, worker):
        """A process takes the place of a worker that was lost, at its step."""
        self.watch.leaves(worker)
        self.watch.begins(worker, self.now)
        self.workers[worker] = Heartbeat(step=1, phase="joining", progress=0)
        self.goes_on(1, frozen=[worker])
        self.watch.forms(worker, self.now)

    def hangs(self, times=None, stopped=(), **more):
        found = self.watch.hangs(self.now, times or {}, stopped.__contains__, **more)
        return [(hang.worker, hang.phase) for hang in found]


def beats(seconds):
    return int(seconds / BEAT_S) + 2


def test_a_worker_that_makes_progress_does_not_hang():
    shown = Shown(0, 1)
    shown.goes_on(500)
    assert shown.hangs() == []


@pytest.mark.parametrize("step_s", [0.01, 0.1, 2.0])
def test_a_worker_that_falls_silent_hangs_after_some_step_times_and_not_before(step_s):
    shown = Shown(0, 1, step_s=step_s)
    limit_s = max(FLOOR_S, STEPS * step_s)
    assert limit_s < max(2.0, 3 * step_s)
    shown.goes_on(int(limit_s / BEAT_S) - 1, silent=[1])
    assert shown.hangs() == []
    shown.goes_on(3, silent=[1])
    assert shown.hangs() == [(1, "forward")]


def test_where_a_replacement_costs_much_nobody_hangs_before_a_minute():
    shown = Shown(0, 1)
    shown.goes_on(beats(SILENT_S - 2), silent=[1])
    assert shown.hangs(least_s=SILENT_S) == []
    assert shown.hangs() == [(1, "forward")]
    shown.goes_on(beats(4), silent=[1])
    assert shown.hangs(least_s=SILENT_S) == [(1, "forward")]


@pytest.mark.parametrize("phase", sorted(OF_A_STEP))
def test_a_worker_that_sends_heartbeats_without_progress_hangs(phase):
    shown = Shown(0, 1)
    shown.at(1, phase)
    shown.goes_on(beats(FLOOR_S), frozen=[1])
    assert shown.hangs() == [(1, phase)]


def test_a_read_may_stall_for_long_as_disks_do():
    shown = Shown(0, 1)
    shown.at(1, "loading")
    shown.goes_on(beats(UNKNOWN_S) - 4, frozen=[1])
    assert shown.hangs() == []
    shown.goes_on(4, frozen=[1])
    assert shown.hangs() == [(1, "loading")]


@pytest.mark.parametrize("phase", ["loading", "validation"])
def test_a_store_may_stall_as_long_whatever_was_read_before(phase):
    shown = Shown(0, 1)
    for _ in range(3):  # seen, and quick
        shown.at(1, phase)
        shown.goes_on(2, frozen=[1], share=1.0)
        shown.at(1, "forward")
        shown.goes_on(2)
    shown.at(1, phase)
    shown.goes_on(beats(UNKNOWN_S) - 4, frozen=[1], share=0.2)  # a client that asks again
    assert shown.hangs() == []
    shown.goes_on(4, frozen=[1])
    assert shown.hangs() == [(1, phase)]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_read_that_keeps_a_processor_busy_and_gets_nothing_done_hangs(share):
    shown = Shown(0, 1)
    shown.at(1, "loading")
    shown.goes_on(beats(FLOOR_S / 2), frozen=[1], share=share)
    assert shown.hangs() == []
    shown.goes_on(beats(FLOOR_S / 2), frozen=[1], share=share)
    assert shown.hangs() == [(1, "loading")]


def test_a_read_on_a_crowded_machine_is_given_what_others_use():
    shown = Shown(0, 1)
    shown.at(1, "loading")
    shown.goes_on(beats(FLOOR_S), frozen=[1], share=0.3)
    assert shown.hangs() == []
    shown.goes_on(beats(FLOOR_S), frozen=[1], share=0.3)
    assert shown.hangs() == [(1, "loading")]


@pytest.mark.parametrize("sample_s", [3.0, 5.0, 25.0])
def test_a_sample_that_takes_long_now_and_then_is_learnt(sample_s):
    """It costs one process: the one that takes its place gets to the end of it."""
    shown = Shown(0, 1)
    assert shown.reads(1, sample_s) < sample_s
    shown.replaced(1)
    assert shown.reads(1, sample_s, times=1) == sample_s
    for worker in (0, 1):
        shown.watch.commits(worker, 500, 0.05)
    assert shown.reads(1, 1.2 * sample_s) == 1.2 * sample_s
    loop_s = shown.reads(1, math.inf)
    assert 1.5 * sample_s < loop_s < 1.2 * STEPS * sample_s + 1.0


@pytest.mark.parametrize("sample_s", [3.0, 5.0, 25.0])
def test_a_slow_sample_is_learnt_also_where_others_read_it_in_the_end(sample_s):
    shown = Shown(0, 1, 2)
    lost = 0
    while shown.reads(lost % 3, sample_s) < sample_s:
        shown.replaced(lost % 3)
        shown.watch.commits(lost % 3, 1, 0.05)
        lost += 1
        assert lost <= 4
    assert lost
    assert shown.reads(0, sample_s) == sample_s


def test_samples_that_never_end_are_found_each_time_after_earlier_ones():
    shown = Shown(0, 1)
    for _ in range(20):
        assert shown.reads(1, math.inf) < UNKNOWN_S + 1.0
        shown.replaced(1)
        assert shown.reads(1, 0.2, times=1) == 0.2  # it is left out, or ends there
        shown.watch.commits(1, 1, 0.05)


def test_a_store_that_stalled_until_its_reader_was_lost_makes_no_loop_last_longer():
    shown = Shown(0, 1)
    assert shown.reads(1, math.inf, share=0.0) > UNKNOWN_S
    shown.replaced(1)
    shown.watch.commits(1, 1, 0.05)
    assert shown.reads(1, math.inf) < 2 * FLOOR_S


def test_nothing_is_learnt_of_a_read_that_was_lost_for_another_reason():
    shown = Shown(0, 1)
    shown.at(1, "loading")
    shown.goes_on(3, frozen=[1], share=1.0)
    shown.replaced(1)
    assert shown.reads(1, 10.0, times=1) == 10.0  # its first, which may open what others use
    shown.watch.commits(1, 1, 0.05)
    assert shown.reads(1, math.inf) < 2 * FLOOR_S


def test_the_first_read_of_a_process_says_nothing_of_the_others():
    shown = Shown(0, 1)
    shown.watch.begins(1, shown.now)
    shown.goes_on(1)
    shown.at(1, "loading")
    shown.goes_on(beats(10.0), frozen=[1], share=1.0)
    assert shown.hangs() == []
    shown.at(1, "forward")
    shown.goes_on(2)
    shown.watch.commits(1, 1, 0.05)
    shown.at(1, "loading")
    shown.goes_on(beats(FLOOR_S), frozen=[1], share=1.0)
    assert shown.hangs() == [(1, "loading")]


def test_a_read_that_stalled_for_long_makes_no_loop_last_longer():
    shown = Shown(0, 1)
    shown.at(1, "loading")
    shown.goes_on(beats(20.0), frozen=[1])
    shown.at(1, "forward")
    shown.goes_on(2)
    shown.at(1, "loading")
    shown.goes_on(beats(FLOOR_S), frozen=[1], share=1.0)
    assert shown.hangs() == [(1, "loading")]


def test_a_worker_that_builds_and_sends_heartbeats_has_no_timeout():
    shown = Shown(0, 1)
    shown.watch.begins(1, shown.now, ready=False)
    shown.at(1, "recipe")
    shown.goes_on(beats(10 * UNKNOWN_S), frozen=[1], share=1.0)
    assert shown.hangs() == []


def gets_ready(*workers):
    """A run at its beginning, where these read a sample before they are ready."""
    shown = Shown(*workers, step_s=None)
    for worker in workers:
        shown.watch.begins(worker, shown.now, ready=False)
        shown.workers[worker] = Heartbeat(phase="building", progress=3)
    shown.goes_on(1)
    return shown


@pytest.mark.parametrize("workers", [[0], [0, 1]])
@pytest.mark.parametrize("times", [0, 1])
def test_a_read_that_loops_has_half_a_minute_each_time_before_its_process_is_ready(workers, times):
    shown = gets_ready(*workers)
    given_s = shown.reads(0, 10 * UNKNOWN_S, times=times)
    assert UNKNOWN_S <= given_s < UNKNOWN_S + 2 * BEAT_S
    (hang,) = shown.watch.hangs(shown.now, {0: times})
    assert hang.loops


def test_a_building_worker_is_found_in_a_read_that_loops_while_others_train():
    shown = Shown(0, 1)
    shown.watch.begins(1, shown.now, ready=False)
    shown.workers[1] = Heartbeat(phase="building")
    shown.goes_on(1)
    assert UNKNOWN_S <= shown.reads(1, 10 * UNKNOWN_S) < UNKNOWN_S + 2 * BEAT_S


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_store_may_stall_as_long_before_a_process_is_ready_as_in_training(times):
    shown = gets_ready(0)
    given_s = shown.reads(0, 10 * UNKNOWN_S, times=times, share=0.0)
    assert UNKNOWN_S * 2**times <= given_s < UNKNOWN_S * 2**times + 2 * BEAT_S


def test_a_building_worker_may_read_as_long_as_its_reads_end():
    shown = gets_ready(0)
    shown.at(0, "loading")
    for _ in range(20):
        shown.goes_on(beats(UNKNOWN_S) - 4, frozen=[0], share=1.0)
        shown.goes_on(1)
        assert shown.hangs() == []
    shown.at(0, "building")
    shown.goes_on(beats(10 * UNKNOWN_S), frozen=[0], share=1.0)
    assert shown.hangs() == []


def test_a_building_worker_may_be_silent_for_long_unless_it_was_stopped():
    shown = Shown(0, 1)
    shown.watch.begins(1, shown.now, ready=False)
    shown.at(1, "recipe")
    shown.goes_on(1)
    shown.goes_on(beats(FLOOR_S), silent=[1])
    assert shown.hangs() == []
    assert shown.hangs(stopped=[1]) == [(1, "recipe")]
    shown.goes_on(beats(UNKNOWN_S - 1.5 * FLOOR_S) - 2, silent=[1])
    assert shown.hangs() == []
    shown.goes_on(beats(FLOOR_S), silent=[1])
    assert shown.hangs() == [(1, "recipe")]


def test_a_worker_that_was_stopped_before_a_group_formed_is_found_as_soon():
    shown = Shown(0, 1, 2)
    shown.goes_on(beats(FLOOR_S) - 3, silent=[2])
    for worker in (0, 1, 2):
        shown.watch.forms(worker, shown.now)
    shown.goes_on(3, silent=[2])
    assert shown.hangs() == [(2, "joining")]


def test_if_all_stop_at_once_none_is_blamed_at_first():
    shown = Shown(0, 1)
    shown.goes_on(beats(5 * FLOOR_S), frozen=[0, 1])
    assert shown.hangs() == []
    shown.goes_on(beats(UNKNOWN_S), frozen=[0, 1])
    assert shown.hangs() == [(0, "forward"), (1, "forward")]


@pytest.mark.parametrize("workers", [[0], [0, 1], [0, 1, 2]])
def test_where_all_fall_silent_at_once_they_are_waited_for(workers):
    shown = Shown(*workers)
    shown.goes_on(beats(UNKNOWN_S) - 4, silent=workers)
    assert shown.hangs() == []
    shown.goes_on(4, silent=workers)
    assert shown.hangs() == [(worker, "forward") for worker in workers]


def test_the_last_worker_to_wake_up_is_not_blamed():
    shown = Shown(0, 1)
    shown.goes_on(beats(5 * FLOOR_S), silent=[0, 1])
    assert shown.hangs() == []
    shown.goes_on(beats(FLOOR_S) - 4, silent=[1])
    assert shown.hangs() == []
    shown.goes_on(4, silent=[1])
    assert shown.hangs() == [(1, "forward")]


@pytest.mark.parametrize("workers", [[0], [0, 1]])
def test_a_worker_without_progress_is_found_in_the_end_though_all_had_stopped(workers):
    shown = Shown(*workers)
    for _ in range(beats(UNKNOWN_S) - 3):
        shown.goes_on(1, frozen=workers)
        assert shown.hangs() == []  # looked at as often as the master does
    shown.goes_on(4, frozen=workers)
    assert shown.hangs() == [(worker, "forward") for worker in workers]


def test_a_loop_is_found_also_if_steps_are_so_quick_that_none_was_reported_yet():
    shown = Shown(0, step_s=None)
    shown.workers[0] = msgspec.structs.replace(shown.workers[0], steps=1, phase="loading")
    shown.goes_on(1)
    shown.goes_on(beats(FLOOR_S), frozen=[0], share=1.0)
    assert shown.hangs() == [(0, "loading")]


def test_a_worker_that_falls_silent_shortly_before_the_others_is_not_blamed():
    shown = Shown(0, 1, 2)
    shown.goes_on(2, silent=[0])
    shown.goes_on(beats(5 * FLOOR_S), silent=[0, 1, 2])
    assert shown.hangs() == []
    shown.goes_on(beats(FLOOR_S), silent=[0])
    assert shown.hangs() == [(0, "forward")]


@pytest.mark.parametrize("workers", [[0], [0, 1]])
def test_a_read_that_loops_is_found_as_soon_if_no_other_worker_makes_progress(workers):
    shown = Shown(*workers)
    for worker in workers:
        shown.at(worker, "loading")
    shown.goes_on(beats(FLOOR_S) - 4, frozen=workers, share=1.0)
    assert shown.hangs() == []
    shown.goes_on(4, frozen=workers, share=1.0)
    assert shown.hangs() == [(0, "loading")]  # the other holds what was trained


def test_a_loop_is_given_longer_than_the_longest_read_and_not_than_a_long_step():
    shown = Shown(0, 1, step_s=10.0)
    assert shown.reads(1, math.inf) < 2 * FLOOR_S
    shown = Shown(0, 1)
    shown.watch.commits(1, 10, 5.0, 4.0)  # the data of a step take four seconds
    assert 0.8 * STEPS * 0.8 < shown.reads(1, math.inf) < STEPS * 4.0


def test_a_read_that_looped_has_half_a_minute_the_second_time():
    shown = Shown(0, 1)
    assert shown.reads(1, math.inf) < 2 * FLOOR_S
    shown.replaced(1)
    again_s = shown.reads(1, math.inf, times=1)
    assert UNKNOWN_S <= again_s < UNKNOWN_S + 2 * BEAT_S


def test_an_exchange_that_was_abandoned_before_gets_a_longer_timeout():
    shown = Shown(0, 1)
    for worker in (0, 1):
        shown.at(worker, "exchange")
    shown.goes_on(beats(2 * FLOOR_S), frozen=[0, 1])
    assert shown.watch.stuck_s([0, 1], shown.now, times=0) > 0
    assert shown.watch.stuck_s([0, 1], shown.now, times=2) == 0.0


@pytest.mark.parametrize("phase", sorted(WAITING))
def test_a_worker_that_waits_for_others_does_not_hang(phase):
    shown = Shown(0, 1)
    shown.at(1, phase)
    shown.goes_on(beats(10 * UNKNOWN_S), frozen=[1])
    assert shown.hangs() == []


def test_what_the_run_has_not_seen_the_end_of_may_take_long():
    shown = Shown(0, 1)
    shown.at(1, "validation")
    shown.goes_on(beats(UNKNOWN_S) - 4, frozen=[1])
    assert shown.hangs() == []
    shown.goes_on(4, frozen=[1])
    assert shown.hangs() == [(1, "validation")]


def test_how_long_a_thing_took_is_learnt():
    shown = Shown(0, 1)
    shown.at(1, "validation")
    shown.goes_on(beats(4.0), frozen=[1], share=1.0)
    shown.at(1, "forward")
    shown.goes_on(2)
    shown.at(1, "validation")
    shown.goes_on(beats(4.0), frozen=[1], share=1.0)
    assert shown.hangs() == []
    shown.goes_on(beats(STEPS * 4.0), frozen=[1], share=1.0)
    assert shown.hangs() == [(1, "validation")]


def test_the_first_step_of_a_process_may_take_long():
    shown = Shown(0, 1)
    shown.watch.begins(1, shown.now)
    shown.goes_on(1)
    shown.goes_on(beats(5 * FLOOR_S), frozen=[1])
    assert shown.hangs() == []


@pytest.mark.parametrize("times", [1, 2, 4])
def test_the_timeout_doubles_with_each_hang_at_the_same_place(times):
    shown = Shown(0, 1)
    shown.goes_on(beats(FLOOR_S * 2**times) - 4, silent=[1])
    assert shown.hangs({1: times}) == []
    shown.goes_on(5, silent=[1])
    assert shown.hangs({1: times}) == [(1, "forward")]


def test_a_worker_five_times_slower_is_kept():
    shown = Shown(0, 1, step_s=1.0)
    for _ in range(1000):  # its forward pass is a third of a step, and was quick before
        shown.at(1, "forward")
        shown.goes_on(beats(5 / 3), frozen=[1])
        assert shown.hangs() == []
        shown.at(1, "backward")
        shown.goes_on(1)


def test_a_watchdog_that_did_not_run_blames_no_worker_for_it():
    shown = Shown(0, 1)
    shown.now += 60.0
    shown.watch.turn(shown.now)
    assert shown.hangs() == []
    shown.goes_on(beats(FLOOR_S), silent=[1])
    assert shown.hangs() == [(1, "forward")]


def test_a_worker_that_compiles_does_not_hang():
    shown = Shown(0, 1)
    shown.at(1, "compiling")
    shown.goes_on(beats(2 * UNKNOWN_S), frozen=[1])
    assert shown.hangs() == []


def test_a_worker_whose_compiler_keeps_the_interpreter_is_given_as_long_as_one_that_starts():
    shown = Shown(0, 1)
    shown.at(1, "compiling")
    shown.goes_on(1)
    shown.goes_on(beats(UNKNOWN_S) - 5, silent=[1])
    assert shown.hangs() == []
    assert shown.hangs(stopped=[1]) == [(1, "compiling")]
    shown.goes_on(10, silent=[1])
    assert shown.hangs() == [(1, "compiling")]


def test_an_exchange_in_which_all_wait_is_stuck():
    shown = Shown(0, 1)
    for worker in (0, 1):
        shown.at(worker, "exchange")
    shown.goes_on(3, frozen=[0, 1])
    assert shown.watch.stuck_s([0, 1], shown.now) == 0.0
    shown.goes_on(beats(FLOOR_S), frozen=[0, 1])
    assert shown.watch.stuck_s([0, 1], shown.now) > FLOOR_S
    shown.at(1, "forward")
    shown.goes_on(1)
    assert shown.watch.stuck_s([0, 1], shown.now) == 0.0


def test_an_exchange_before_the_first_step_is_stuck_after_half_a_minute():
    shown = Shown(0, 1, step_s=None)
    for worker in (0, 1):
        shown.at(worker, "exchange")
    shown.goes_on(int(UNKNOWN_S / BEAT_S) - 1, frozen=[0, 1])
    assert shown.watch.stuck_s([0, 1], shown.now) == 0.0
    shown.goes_on(4, frozen=[0, 1])
    assert shown.watch.stuck_s([0, 1], shown.now) > UNKNOWN_S
    assert shown.watch.stuck_s([0, 1], shown.now, times=1) == 0.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from([*OF_A_STEP, *WAITING]), st.floats(0, FLOOR_S / 2)
        ),
        max_size=40,
    )
)
def test_a_worker_that_shows_progress_often_enough_is_never_blamed(story):
    shown = Shown(0, 1, 2)
    for worker, phase, seconds in story:
        shown.at(worker, phase)
        shown.goes_on(int(seconds / BEAT_S), frozen=[worker])
        assert shown.hangs() == []
        shown.goes_on(1)


def test_a_worker_that_does_not_leave_its_group_hangs_in_the_end_though_others_wait_for_it():
    shown = Shown(0, 1)
    shown.at(0, "joining")
    shown.at(1, "leaving")
    shown.goes_on(beats(UNKNOWN_S / 2), frozen=[0, 1])
    assert shown.hangs() == []
    shown.goes_on(beats(UNKNOWN_S / 2), frozen=[0, 1])
    assert shown.hangs() == [(1, "leaving")]


# ---- replicas of several processes


def of_two_replicas():
    """Workers 0 and 1 share a replica, and 2 and 3 another."""
    shown = Shown(0, 1, 2, 3)
    shown.watch.ranks = 2
    return shown


def until_named(shown, **how):
    """Who is named first, and after how many seconds; nobody within `UNKNOWN_S`: []."""
    began = shown.now
    while shown.now - began < UNKNOWN_S - 1:
        shown.goes_on(1, **how)
        if found := shown.hangs():
            return found
    return []


def test_a_silent_process_hangs_and_not_the_fellow_that_waits_for_it_inside_a_pass():
    shown = of_two_replicas()
    for worker in (2, 3):
        shown.at(worker, "exchange")
    assert until_named(shown, frozen=(1, 2, 3), silent=(0,)) == [(0, "forward")]


def test_a_silent_process_of_the_only_replica_hangs_though_all_get_nothing_done():
    shown = Shown(0, 1)
    shown.watch.ranks = 2
    assert until_named(shown, frozen=(1,), silent=(0,)) == [(0, "forward")]
    alone = Shown(0, 1)  # two replicas: a machine that stalls, as far as anybody can tell
    assert until_named(alone, frozen=(1,), silent=(0,)) == []


def test_a_process_that_waits_for_a_fellow_that_reads_or_saves_does_not_hang():
    for phase in ("loading", "saving", "validation", "compiling"):
        shown = of_two_replicas()
        shown.at(0, phase)
        for worker in (2, 3):
            shown.at(worker, "exchange")
        assert until_named(shown, frozen=(0, 1, 2, 3)) == [], phase


def test_of_two_fellows_the_one_that_computes_hangs():
    shown = of_two_replicas()
    for worker in (2, 3):
        shown.at(worker, "exchange")
    busy = msgspec.structs.replace
    for _ in range(int(UNKNOWN_S / BEAT_S)):
        shown.workers[1] = busy(shown.workers[1], cpu_s=shown.workers[1].cpu_s + BEAT_S)
        shown.goes_on(1, frozen=(0, 1, 2, 3))
        if found := shown.hangs():
            break
    assert found == [(1, "forward")]


def test_of_fellows_that_all_hang_one_is_named():
    shown = of_two_replicas()
    for worker in (2, 3):
        shown.at(worker, "exchange")
    shown.goes_on(1, but=(0,))
    assert until_named(shown, frozen=(0, 1, 2, 3)) == [(0, "forward")]


def meets(cpu_s, seconds, often=0):
    """Who hangs, and when, of a replica that meets; `cpu_s` of its first process by then."""
    watch = Watch(ranks=2)
    for worker in (0, 1):
        watch.begins(worker, 0.0, ready=False)
    for beat in range(int(seconds / BEAT_S)):
        now = beat * BEAT_S
        watch.turn(now)
        watch.heartbeat(0, Heartbeat(phase="meeting", cpu_s=cpu_s(now)), now)
        watch.heartbeat(1, Heartbeat(phase="meeting"), now)
        if found := watch.hangs(now, {0: often, 1: often}):
            return [hang.worker for hang in found], now
    return [], now


def test_processes_that_wait_for_each_other_before_they_are_built_hang():
    workers, at = meets(lambda now: min(now, 20.0), 200)
    assert workers == [0]
    assert 79 <= at < 81  # a minute after one of them worked
    workers, at = meets(lambda now: 0.0, 200, often=1)
    assert workers == [0]
    assert 120 <= at < 121


def test_a_slow_trial_of_a_replica_does_not_hang():
    assert meets(lambda now: now / 50, 1000)[0] == []


def test_a_process_that_waits_for_its_fellows_before_it_is_built_does_not_hang():
    watch = Watch(ranks=2)
    watch.begins(0, 100.0, ready=False)
    for beat in range(2000):
        now = 100.0 + beat * BEAT_S
        watch.turn(now)
        watch.heartbeat(0, Heartbeat(phase="meeting"), now)
        assert watch.hangs(now, {}) == []
