"""How far `instep plan` is from real runs."""

from typing import Any

from questions.base import Answer, Ask, Question, found


def of_steps(what: str, unit: str = " %", times: float = 100) -> Ask:
    """A figure over all cells; the first entry sums them up."""

    def ask(result: Any) -> Answer:
        total = result["results"][0]
        busy = [each["others_busy"] for each in result["results"][1:]]
        spread = f"{total['cells']} cells, others on {min(busy):.1f} to {max(busy):.1f} of 2 cores"
        return found(times * total[what], unit, 1, spread)

    return ask


def pays(result: Any) -> Answer:
    right, asked = result["results"][0]["pays"]
    return found(100 * right / asked, " %", 0, f"{right} of {asked} cases")


def memory(what: str) -> Ask:
    def ask(result: Any) -> Answer:
        total = result["results"][0]
        return found(100 * total[what], " %", 1, f"{total['roles']} roles of processes")

    return ask


RUN, AGAIN = "a real run", "plan(-again|-quiet)?"

QUESTIONS = (
    Question(
        "mean error of a planned step",
        "plan",
        AGAIN,
        of_steps("mean_error"),
        RUN,
        most=8,
        unit=" %",
    ),
    Question(
        "planned steps within 20 %", "plan", AGAIN, of_steps("within_20"), RUN, least=95, unit=" %"
    ),
    Question(
        "runs inside the interval of their plan",
        "plan",
        AGAIN,
        of_steps("inside_interval"),
        RUN,
        least=85,
        unit=" %",
    ),
    Question(
        "how much slower than the fastest the chosen way is, mean",
        "plan",
        AGAIN,
        of_steps("mean_regret"),
        "the fastest way",
        most=2,
        unit=" %",
    ),
    Question(
        "median width of the interval, as a share of the step",
        "plan",
        AGAIN,
        of_steps("median_width"),
        most=25,
        unit=" %",
    ),
    Question("whether several workers pay, right", "plan", AGAIN, pays, RUN, least=98, unit=" %"),
    Question(
        "break-even factor of steps, within 10 %",
        "plan",
        AGAIN,
        of_steps("break_even_factor_within_10"),
        "the ratio of real steps",
        least=100,
        unit=" %",
    ),
    Question(
        "mean error of planned memory",
        "plan",
        "plan-memory(-again|-quiet)?",
        memory("mean_error"),
        "most resident memory of the process",
        most=8,
        unit=" %",
    ),
)
