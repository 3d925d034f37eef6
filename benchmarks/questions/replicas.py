"""Meshes, clusters, and hundreds of workers."""

import statistics
from typing import Any

from questions.base import Answer, Ask, Question, beside, case, found, quartiles, span, turns


def whole_run(name: str) -> Ask:
    return lambda result: quartiles(case(result, case=name)[f"speed over {name}"])


def sharded_bytes(zero: int) -> Ask:
    def ask(result: Any) -> Answer:
        sent = [
            max(statistics.median(each[name]["sent"]) for each in result["results"])
            for name in ("DDP", f"ours, ZeRO {zero}", f"FSDP2, ZeRO {zero}")
        ]
        return found(sent[1] / sent[0], spread=f"plain FSDP2 {sent[2] / sent[0]:.2f}")

    return ask


def sharded_speed(zero: int) -> Ask:
    def ask(result: Any) -> Answer:
        first = case(result, rank=0)
        names = (f"FSDP2, ZeRO {zero}", f"ours, ZeRO {zero}")
        ratios = beside(*(first[name]["seconds"] for name in names))
        low, middle, high = statistics.quantiles(ratios, method="inclusive")
        return found(middle, spread=f"{len(ratios)} turns, quartiles {span((low, high))}")

    return ask


def mesh_memory(result: Any) -> Answer:
    every = [
        each["training_over_promise"] for each in result["results"] if each["malloc"] != "plain"
    ]
    return found(every, spread=f"{len(every)} rounds")


def tensor_plan(result: Any) -> Answer:
    return quartiles(case(result, sequence=False)["speed over the plan by hand"])


def pipelines(schedule: str) -> Ask:
    def ask(result: Any) -> Answer:
        every = [
            speed
            for name, runs in result["speed_and_cpu_of_torch"].items()
            if name.startswith(f"{schedule},")
            for speed, _ in runs["new"]
        ]
        return turns(every, 3)

    return ask


def bubble(result: Any) -> Answer:
    names = ("gpipe", "1f1b", "interleaved")
    every = [each[name]["of_theory"] for each in result["bubble"] for name in names]
    return found(every, places=3, spread=f"{len(every)} cases")


def master(workers: int) -> Ask:
    def ask(result: Any) -> Answer:
        for each in result["found"]:
            if (each["workers"], each["training"], each["encrypted"]) == (workers, False, False):
                return found(100 * each["core_share_of_the_master"], " % of a core", 1)
        raise LookupError(workers)

    return ask


def ray_start(what: str) -> Ask:
    def ask(result: Any) -> Answer:
        every = [each[what] for each in result["rounds"]["command"]]
        return found(result[f"command: {what}"], " s", 1, f"rounds {span(every, 1)} s")

    return ask


QUESTIONS = (
    Question(
        "whole run of one replica, `zero = 3`: speed",
        "against_torch",
        "against-torch-meshes",
        whole_run("zero3"),
        "a script with FSDP2",
    ),
    Question(
        "the same, `zero = 2`",
        "against_torch",
        "against-torch-meshes",
        whole_run("zero2"),
        "a script with FSDP2",
    ),
    Question(
        "the same, two stages, `1f1b`",
        "against_torch",
        "against-torch-meshes",
        whole_run("1f1b"),
        "a script with `Schedule1F1B`",
    ),
    Question(
        "a step with `zero = 3` on four hosts: speed",
        "sharded",
        "sharded",
        sharded_speed(3),
        "plain FSDP2",
    ),
    Question("the same: bytes", "sharded", "sharded", sharded_bytes(3), "DDP"),
    Question(
        "a step with `zero = 2`: speed", "sharded", "sharded", sharded_speed(2), "plain FSDP2"
    ),
    Question("the same: bytes", "sharded", "sharded", sharded_bytes(2), "DDP"),
    Question(
        "memory of a sharded process",
        "mesh_memory",
        "mesh-memory.*",
        mesh_memory,
        "what is promised",
    ),
    Question(
        "a GPT cut by a tensor plan that was found: speed",
        "tensor_plan",
        "tensor-plan",
        tensor_plan,
        "a plan by hand, `parallelize_module`",
    ),
    Question(
        "a pipeline, `1f1b`: speed",
        "pipeline",
        "pipeline-before-after",
        pipelines("1f1b"),
        "torch's schedule",
        least=0.98,
    ),
    Question(
        "the same, `interleaved`",
        "pipeline",
        "pipeline-before-after",
        pipelines("interleaved"),
        "torch's schedule",
        least=0.98,
    ),
    Question(
        "the time of a pass in a pipeline of two stages", "pipeline", "pipeline", bubble, "theory"
    ),
    Question(
        "the master of 1,000 workers",
        "master_scale",
        "master-scale",
        master(1000),
        most=10,
        unit=" %",
    ),
    Question(
        "two hosts of a warm Ray cluster are ready after",
        "ray_start",
        "ray-start",
        ray_start("hosts ready"),
        most=5,
        unit=" s",
    ),
    Question(
        "they train after", "ray_start", "ray-start", ray_start("first step"), most=5, unit=" s"
    ),
)
