"""Costs of masks, and of private steps."""

from typing import Any

from questions.base import Answer, Ask, Question, case, found, span

DRAWN_OUT = "100mbit"
"""The rate of links for hosts that have a tenth of a core each, as others use this machine too."""


def masks(result: Any) -> Answer:
    each = result["masks"]
    return found(each["gb_s"], " GB/s", 1, f"a copy of memory {each['copy_gb_s']:.1f} GB/s")


def of_bytes(result: Any) -> Answer:
    return found(result["round"]["bytes_over_open"], "", 3, "8 participants, 1 million parameters")


def of_round(result: Any) -> Answer:
    each = case(result, rate=DRAWN_OUT)
    low, middle, high = each["over_open"]
    loaded = f"quartiles {span((low, high))}, load {each['load']:.0f} on {each['cores']} cores"
    return found(middle, "", 2, loaded)


def over(model: str, other: str) -> Ask:
    def ask(result: Any) -> Answer:
        low, middle, high = result["steps"][model][f"over {other}"]
        return found(middle, "", 1, f"quartiles {span((low, high), 1)}")

    return ask


def of_faults(result: Any) -> Answer:
    each = case(result, what="planted")
    seconds = f"of {each['faults']}, each in {each['longest_s']:g} s at most"
    return found(float(len(each["missed"])), "", 0, seconds)


def of_right_code(result: Any) -> Answer:
    each = case(result, what="right")
    return found(float(len(each["failed"])), "", 0, f"of {each['steps']} attacks")


def of_bounds(result: Any) -> Answer:
    shares = [share for each in case(result, what="bounds")["each"] for share in each["of_truth"]]
    return found(min(shares), "", 2, f"{span(shares)} in {len(shares)} attacks")


def off(result: Any) -> Answer:
    each = case(result, sampling="poisson")
    return found(each["worst"]["off"], "", 4, f"the worst of {each['settings']} settings")


def gap(result: Any) -> Answer:
    each = case(result, sampling="allocation")
    took = f"median {each['median_cpu_s']:.1f} s and at most {each['worst']['cpu_s']:.1f} s of CPU"
    return found(each["worst"]["gap"], "", 3, f"the worst of {each['settings']} settings; {took}")


QUESTIONS = (
    Question(
        "epsilon of Poisson, relative difference",
        "private",
        "accounting",
        off,
        beside="dp-accounting, used directly",
        most=0.001,
    ),
    Question("gap of the bounds of allocation", "private", "accounting", gap, most=0.05),
    Question("planted faults that the auditor misses", "private", "auditor", of_faults, most=0),
    Question("right steps that it finds wrong", "private", "auditor", of_right_code, most=0),
    Question(
        "its lower bound at epsilon 1, 2 and 4, the least",
        "private",
        "auditor",
        of_bounds,
        beside="the true epsilon",
        least=0.8,
    ),
    Question("masks added to numbers, on one core", "private", "privacy", masks, least=2),
    Question(
        "bytes of a masked round over those of an open one",
        "private",
        "privacy",
        of_bytes,
        most=1.02,
    ),
    Question(
        "a masked round of 8 hosts over an open one, 10 million parameters, 1 Gbit/s drawn out",
        "private",
        "secure-round",
        of_round,
        most=1.1,
    ),
    *(
        Question(
            f"a private step of {kind}, processor time",
            "private",
            "privacy",
            over(model, other),
            beside=beside,
            most=most,
        )
        for model, kind in (("mlp", "an MLP"), ("cnn", "a CNN"), ("transformer", "a transformer"))
        for other, beside, most in (
            ("plain", "a plain step", 2.5),
            ("opacus", "Opacus's hooks", 1.0),
        )
    ),
)
