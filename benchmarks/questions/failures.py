"""How long a run stands still when something fails, and whether its result shows it."""

import statistics
from typing import Any

from questions.base import Answer, Ask, Question, case, found, span


def recovery(result: Any) -> Answer:
    ours = result["systems"]["instep"]
    spread = f"{ours['kills']} kills, worst {ours['full_s']['worst']:.2f} s"
    return found(ours["full_s"]["median"], " s", 2, spread)


def recovery_over(name: str) -> Ask:
    def ask(result: Any) -> Answer:
        its = result["systems"][name]
        ours = result["systems"]["instep"]["full_s"]["median"]
        spread = f"{its['full_s']['median']:.2f} s beside {ours:.3f} s, {its['kills']} kills"
        return found(its["full_over_ours"]["median"], " times as long", 1, spread)

    return ask


def same_bits(result: Any) -> Answer:
    ours = result["systems"]["instep"]
    same = all(each["same_bits_as_undisturbed"] for each in ours["turns"])
    return Answer("the same bits" if same else "OTHER BITS", f"{ours['kills']} kills", (same,))


def steps_redone(name: str) -> Ask:
    def ask(result: Any) -> Answer:
        ours, theirs = (result["systems"][each]["all_redone"] for each in ("instep", name))
        spread = f"{name} {sum(theirs)} in {len(theirs)} kills"
        return Answer(f"{sum(ours)} in {len(ours)} kills", spread, (sum(ours),))

    return ask


def search_killed(result: Any) -> Answer:
    differ = result["trials"] - result["same"]
    kills = sum(result["kills"].values())
    return found(differ, "", 0, f"{result['trials']} trials, {kills} kills")


def as_good_as_optuna(result: Any) -> Answer:
    value = result["p_over_all_at_width_4"]
    each = [r["p_that_ours_is_no_worse"] for r in result["results"]]
    return found(value, "", 2, f"3 functions at widths 1 and 4: {span(each)}")


def servers_killed(result: Any) -> Answer:
    every = [each for each in result.values() if isinstance(each, dict)]
    after = [each["after_detection_s"] for each in every]
    if not after:
        raise LookupError("no strategy")
    kills = sum(each["kills"] for each in every)
    spread = f"{kills} kills, worst {max(each['worst'] for each in after):.2f} s"
    return found([each["median"] for each in after], " s", 2, spread)


def mesh_recovery(shard: int) -> Ask:
    def ask(result: Any) -> Answer:
        one = case(result, millions=10, shard=shard)
        spread = f"{one['kills']} kills, worst {one['full_s']['worst']:.1f} s"
        spread += f"; a step {one['usual_step_s']:.1f} s"
        return found(one["full_s"]["median"], " s", 1, spread)

    return ask


def on_ray(result: Any) -> Answer:
    """The run on one machine was measured before and after it, half of the kills each time."""
    here = result["on_this_machine"]["each_s"]
    half = len(here) // 2
    quieter = min(statistics.median(part) for part in (here[:half], here[half:]))
    whole, of_half = result["ray_over_this_machine"], result["on_ray"]["killed"]["median"] / quieter
    spread = f"{of_half:.1f} times the quieter half of it"
    return Answer(f"{whole:.2f} times as long", spread, (whole, of_half))


def partitions(result: Any) -> Answer:
    worst = result["still_s"]["worst"]
    spread = f"{result['partitions']} partitions, worst {worst:.1f} s"
    return found(result["still_s"]["median"], " s", 1, spread)


def slow_worker(determinism: str) -> Ask:
    return lambda result: found(
        case(result, determinism=determinism, slower=4.0)["of_speeds_once_dealt"]
    )


def mixed_speeds(result: Any) -> Answer:
    speeds = [[1.0, 1.0, 3.0], [1.0, 4.0]]
    kept = [case(result, speeds=each)["of_speeds_once_dealt"] for each in speeds]
    loads = [case(result, speeds=each)["load"] for each in speeds]
    return found(kept, "", 2, f"at a load of {span(loads, 0)}")


def slow_at_times(result: Any) -> Answer:
    kept = result["slow"]["bounded_stale"]["kept"]
    return found(kept["mean"], "", 3, f"95 %: {span((kept['low'], kept['high']), 3)}")


def alarms(result: Any) -> Answer:
    one = case(result, case="false alarms")
    return found(one["found"], "", 0, f"{one['steps']:,} steps")


def wrong(what: str) -> Ask:
    return lambda result: found(result["wrong"], "", 0, f"{result[what]:,} {what}")


def storms(result: Any) -> Answer:
    storms, held = result["storms"], result["held"]
    return Answer(f"{held} of {storms}", "strategies and meshes in turn, at load", (held / storms,))


def on_a_gpu(result: Any) -> Answer:
    pairs, held = result["pairs"], result["held"]
    return Answer(f"{held} of {pairs}", "what failed is mended, not run again", (held / pairs,))


QUESTIONS = (
    Question(
        "one of three workers is killed: all train again after",
        "recovery",
        "recovery(-beside-rivals)?",
        recovery,
    ),
    Question(
        "the same under torchrun",
        "recovery",
        "recovery(-beside-rivals)?",
        recovery_over("torchrun"),
        "instep, in turns",
    ),
    Question(
        "the same under torchft 0.2.0, until its full number trains",
        "recovery",
        "recovery(-beside-rivals)?",
        recovery_over("torchft"),
        "instep, in turns",
    ),
    Question(
        "the parameters after these kills",
        "recovery",
        "recovery(-beside-rivals)?",
        same_bits,
        "an undisturbed run",
        least=1,
        aim="the same",
    ),
    Question(
        "steps that were computed again",
        "recovery",
        "recovery(-beside-rivals)?",
        steps_redone("torchrun"),
        "torchrun",
    ),
    Question(
        "short runs of all strategies and meshes, broken five times each, with the right result",
        "storms",
        "storms",
        storms,
        "undisturbed runs",
        least=1,
        aim="all",
    ),
    Question(
        "a parameter server is killed: training stands still for",
        "server_recovery",
        "server-recovery-.*",
        servers_killed,
        most=2,
        unit=" s",
    ),
    Question(
        "a rank of the only replica, of four processes, is killed",
        "mesh_recovery",
        "mesh-recovery",
        mesh_recovery(4),
    ),
    Question(
        "actors and raylets of a Ray cluster are killed",
        "ray_losses",
        "ray-losses(-again)?",
        on_ray,
        "workers of one machine",
        most=2,
    ),
    Question("a network is cut: no step for", "partitions", "partitions", partitions),
    Question(
        "one of four workers is four times slower: speed",
        "slow_worker",
        "slow-worker",
        slow_worker("order"),
        "the sum of their speeds",
    ),
    Question(
        "workers of unequal speed, at 1 : 1 : 3 and at 1 : 4: speed",
        "slow_worker",
        "mixed-speeds",
        mixed_speeds,
        "the sum of their speeds",
        least=0.9,
    ),
    Question(
        "a worker is twice as slow a tenth of the time, `bounded_stale`: rate",
        "asynchronous",
        "slow-now-and-then",
        slow_at_times,
        "without a slow worker",
        least=0.95,
    ),
    Question(
        "`check.corruption` where nothing is damaged: what it found",
        "corruption",
        "corruption",
        alarms,
        most=0,
        aim="none",
    ),
    Question(
        "`instep prepare` and its workers are killed: wrong results",
        "preparing",
        "prepare-kills",
        wrong("kills"),
        "an undisturbed one",
        most=0,
        aim="none",
    ),
    Question(
        "it dies at each call that changes its folder: wrong results",
        "preparing",
        "prepare-deaths",
        wrong("deaths"),
        "an undisturbed one",
        most=0,
        aim="none",
    ),
    Question(
        "processes of `instep search` are killed, on other numbers of workers: trials that differ",
        "searching",
        "search-kills",
        search_killed,
        "an undisturbed one",
        most=0,
        aim="none",
    ),
    Question(
        "its best of 40 trials at width 4, ten seeds of three functions: is it worse? (Wilcoxon p)",
        "searching",
        "search-optuna",
        as_good_as_optuna,
        "Optuna alone, one trial after the other",
        least=0.05,
    ),
    Question(
        "pairs of model and loss for which the verdict held on a GPU (one H100)",
        "on_a_gpu",
        "on-a-gpu",
        on_a_gpu,
        "a plain loop on it",
        least=1,
        aim="all",
    ),
)
