"""How soon a pool starts a job, and how well it divides its cores."""

from typing import Any

from questions.base import Answer, Ask, Question, found


def latency(of: str) -> Ask:
    """Median seconds of a thing that was done several times; 95 % of them for the spread."""

    def ask(result: Any) -> Answer:
        seen, load = result[of], result["load"]
        spread = f"95 % within {seen['p95_s']:.2f} s, load before {load[0]:.1f} on two cores"
        return found(seen["median_s"], " s", 2, spread)

    return ask


def urgent(result: Any) -> Answer:
    seen = result["urgent"]
    return found(seen["p95_s"], " s", 2, f"median {seen['median_s']:.2f} s")


def decision(result: Any) -> Answer:
    seen = result["decisions"]
    spread = f"95 % within {seen['p95_ms']:.0f} ms; {seen['jobs']:,} jobs, {seen['cores']:,} cores"
    return found(seen["median_ms"], " ms", 0, spread)


def fairness(result: Any) -> Answer:
    worst = [100 * each["worst_hour_off"] for each in result["fairness"]]
    return found(worst, " points", 1, f"{len(worst)} workloads of hours")


def busy(result: Any) -> Answer:
    every = [result[name]["least_busy"] for name in ("two_cores", "sixteen_cores")]
    return found([100 * each for each in every], " %", 1, "simulated, 2 and 16 cores")


def other_bits(result: Any) -> Answer:
    rounds = result["rounds"]
    samples = result["repeated_samples"] + result["missing_samples"]
    spread = (
        f"rounds {len(rounds)}, sessions {result['sessions']}, samples twice or missing {samples}"
    )
    return found(len(rounds) - int(result["same_parameters"].split()[0]), "", 0, spread)


def on_ray(result: Any) -> Answer:
    seen = result["results"][0]
    samples = seen["repeated_samples"] + seen["missing_samples"]
    wrong = seen["other_bits"] + seen["jobs"] - seen["completed"]
    sessions = f"{seen['jobs']} jobs in {seen['sessions']} sessions"
    return found(wrong, "", 0, f"{sessions}, samples twice or missing {samples}")


def drained(result: Any) -> Answer:
    every = [each["drained_s"] for each in result["rounds"]]
    load = [each["load"] for each in result["rounds"]]
    return found(every, " s", 1, f"load {min(load):.0f} to {max(load):.0f} on two cores")


def foreseen(kind: str) -> Ask:
    """Percent of starts or ends that were said within 15 %, for the worse number of cores."""

    def ask(result: Any) -> Answer:
        def parts(way: str) -> list[float]:
            keys = [f"{cores}_cores_{way}_known" for cores in (2, 16)]
            return [100 * result[key][kind]["within_15"] for key in keys]

        later = " and ".join(f"{part:.0f} %" for part in parts("arriving"))
        return found(parts("all_at_once"), " %", 0, f"simulated; where others come later {later}")

    return ask


def beside(rival: str) -> Ask:
    """Mean completion of jobs beside a rival's, in Pollux's simulator: of each load."""

    def ask(result: Any) -> Answer:
        means = [each["mean_completion_s"] for each in result["loads"]]
        ratios = [each["pool_1s"] / each[rival] for each in means]
        counts = ", ".join(f"{each['workloads']} at {each['load']:g}" for each in result["loads"])
        return found(ratios, spread=f"workloads by load: {counts}")

    return ask


LATENCY, POLICY = "pool-latency(-quiet)?", "pool-policy(-again)?"

QUESTIONS = (
    Question(
        "submit to first step, with a free core",
        "pool",
        LATENCY,
        latency("submitted"),
        "the start of the command",
        most=1.0,
        unit=" s",
    ),
    Question(
        "first step of an urgent job on a full pool, 95 % of them",
        "pool",
        LATENCY,
        urgent,
        "the start of the command",
        most=2,
        unit=" s",
    ),
    Question(
        "a killed scheduler has its pool again",
        "pool",
        LATENCY,
        latency("attached"),
        "the start of the next one",
        most=1,
        unit=" s",
    ),
    Question("a decision", "pool", POLICY, decision, most=50, unit=" ms"),
    Question(
        "a share off its due in the worst saturated hour",
        "pool",
        POLICY,
        fairness,
        most=3,
        unit=" points",
    ),
    Question(
        "jobs on three hosts, drained, cut off and killed, that end with other bits",
        "pool",
        "pool-hosts",
        other_bits,
        "one worker without a pool",
        most=0,
    ),
    Question(
        "jobs on three nodes of Ray, one drained and one killed, that end with other bits",
        "pool",
        "pool-on-ray",
        on_ray,
        "one worker without a pool",
        most=0,
    ),
    Question(
        "a drained host is free, its job at a commit", "pool", "pool-hosts", drained, unit=" s"
    ),
    *(
        Question(
            f"{kind} of jobs that are said to within 15 %",
            "pool",
            "pool-ahead",
            foreseen(kind),
            least=80,
            unit=" %",
        )
        for kind in ("starts", "ends")
    ),
    Question(
        "mean completion in Pollux's simulator, batches unchanged",
        "pool",
        "pollux-simulator",
        beside("pollux_published"),
        "Pollux, which changes batches",
        most=1.1,
    ),
    Question(
        "the same",
        "pool",
        "pollux-simulator",
        beside("tiresias_published"),
        "Tiresias",
        most=0.75,
    ),
    Question("cores busy while anything fits", "pool", POLICY, busy, least=95, unit=" %"),
)
