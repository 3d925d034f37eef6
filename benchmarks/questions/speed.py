"""How fast a run is, and what it does beside training."""

import statistics
from typing import Any

from questions.base import Answer, Ask, Question, beside, case, found, noted, quartiles, span

OF_DDP = "plain PyTorch DDP, same model and data"


def against_ddp(name: str) -> Ask:
    def ask(result: Any) -> Answer:
        one = case(result, case=name)
        if "starts" not in one:
            return quartiles(one["speed over ddp"])
        within = f", turns {span(one['turns'])}" if "turns" in one else ""
        return found(one["starts"], spread=f"{len(one['starts'])} starts{within}")

    return ask


def startup(result: Any) -> Answer:
    if "of_import_torch" in result:
        return found(result["of_import_torch"], spread="2 turns of 5 rounds")
    ratio = result["medians"]["instep"] / result["medians"]["import torch"]
    return found(ratio, spread=f"medians of {len(result['rounds'])} rounds")


def engine(result: Any) -> Answer:
    low, middle, high = statistics.quantiles(case(result, case="alone")["wall_us"])
    return found(middle, " microseconds", 0, f"quartiles {span((low, high), 0)}")


def engine_before(name: str) -> Ask:
    def ask(result: Any) -> Answer:
        now, then = (case(result, case=each)["cpu_us"] for each in (name, f"{name}, beside"))
        low, middle, high = statistics.quantiles(beside(now, then))
        return found(middle, spread=f"{len(now)} turns, quartiles {span((low, high))}")

    return ask


def trial(what: str, places: int) -> Ask:
    def ask(result: Any) -> Answer:
        models = result["results"]
        models = [*models.values()] if isinstance(models, dict) else models
        values = [each[what] for each in models]
        middle = f"{len(values)} models, median {statistics.median(values):.{places}f}"
        return found(values, places=places, spread=middle)

    return ask


def loader(result: Any) -> Answer:
    shares = {
        each["way"]: each["share"]
        for each in result
        if each["samples"] == "784 floats, batch 64" and each["step_ms"] == 10.0
    }
    theirs = " and ".join(f"{100 * shares[way]:.1f} %" for way in ("torch 0", "torch 2"))
    ours = shares["instep auto"]
    spread = f"DataLoader {theirs}, without and with two processes"
    return Answer(f"{100 * ours:.1f} %", spread, (ours,))


def save(megabytes: int) -> Ask:
    def ask(result: Any) -> Answer:
        for each in result["results"]:
            if round(each["bytes"] / 1e6) == megabytes:
                return found(each["ratio"], " copies", spread=f"median of {each['turns']} saves")
        raise LookupError(megabytes)

    return ask


def bits(micro_batches: int) -> Ask:
    return lambda result: quartiles(
        case(result, case="mlp", micro_batches=micro_batches)["ratios"]["bits over order"]
    )


def lattice(name: str) -> Ask:
    return lambda result: quartiles(case(result, case=name, passes=1)["lattice over plain"])


def corruption(result: Any) -> Answer:
    name = "gpt of 2 million, 16 micro-batches"
    return quartiles(case(result, case=name)["with over without"])


QUESTIONS = (
    Question(
        "speed on two processes, a GPT of 10 million parameters",
        "against_torch",
        "against-ddp",
        against_ddp("gpt"),
        OF_DDP,
    ),
    Question(
        "the same, an MLP whose step takes 2.5 ms",
        "against_torch",
        "against-ddp",
        against_ddp("mlp"),
        OF_DDP,
    ),
    Question(
        "start to the first step", "startup", "startup", startup, "the time of `import torch`"
    ),
    Question("what the engine adds to a step, one process", "engine", "engine", engine),
    Question(
        "its processor time, one process",
        "engine",
        "engine-beside",
        engine_before("alone"),
        "the version of 2026-11-26",
        most=0.6,
    ),
    Question(
        "the same, each of two processes",
        "engine",
        "engine-beside",
        engine_before("two"),
        "the version of 2026-11-26",
        most=0.6,
    ),
    Question(
        "the trial before the first step, in steps of the model",
        "trial",
        "trial",
        trial("steps", 1),
        most=10,
        unit=" steps",
    ),
    Question(
        "its processor time",
        "trial",
        "trial",
        trial("ratio", 2),
        "that of `a3f6e46e`, of 2026-11-26",
        most=0.5,
    ),
    Question(
        "what loading small samples adds to a step of 10 ms",
        "loader",
        "loader",
        loader,
        "torch's `DataLoader`",
    ),
    Question(
        "what a save of 256 MB holds training up, in copies of the state in memory",
        "checkpoint",
        "checkpoint",
        save(256),
    ),
    Question(
        '`determinism = "bits"`, an MLP, one micro-batch for each worker: time of a step',
        "bits",
        "bits",
        bits(2),
        '`"order"`',
    ),
    Question("the same, four for each worker", "bits", "bits", bits(8), '`"order"`'),
    Question(
        "sums in whole numbers, a GPT: work of a step",
        "lattice",
        "lattice",
        lattice("gpt"),
        "floats",
    ),
    Question(
        "`check.corruption`, a GPT of 2 million: time of a step",
        "corruption",
        "corruption-quiet",
        corruption,
        "without",
        most=1.02,
    ),
    Question(
        "memory that outlives its process: time of a copy",
        "host_memory",
        "host-memory",
        noted("copy_over_ordinary", "", 3, "3 runs"),
        "ordinary memory",
    ),
    Question(
        "`make demo` in a fresh clone, without uv",
        "set_up",
        "demo",
        noted("seconds", " s", 0, "one turn"),
    ),
    Question(
        "the same, with its downloads",
        "set_up",
        "set-up",
        noted("over_torch_alone", spread="one turn each"),
        "`pip install` of torch alone",
        most=1.5,
    ),
    Question(
        "processor time of `make test`",
        "test_cpu",
        "test-cpu",
        noted("over_before"),
        "that of `a3f6e46e`, of 2026-11-26",
        most=0.5,
    ),
)
