"""A question, an answer, and how figures are found in a result.

A function that answers takes the content of one result and returns an `Answer`, or raises a
`LookupError` where that result does not have the figure; then an older one is asked. It computes
nothing but medians and ratios of what is in the result.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """A figure in words, how certain it is, and the values to compare with what is wanted."""

    figure: str
    spread: str = ""
    values: tuple[float, ...] = ()


Ask = Callable[[Any], Answer]


class Question(NamedTuple):
    """A row of the page."""

    asks: str
    page: str
    """A file of `measured/`, without its ending: method and history."""
    results: str
    """A pattern that the name of a result matches, without its date."""
    answer: Ask
    beside: str = ""
    """The rival, or what the figure is a ratio to."""
    most: float | None = None
    """What is wanted: the largest value that is good enough."""
    least: float | None = None
    """What is wanted: the least value that is good enough."""
    unit: str = ""
    """Behind what is wanted."""
    aim: str = ""
    """What is wanted, in words that say it better than a bound."""

    @property
    def wanted(self) -> str:
        """In words; empty where there was no aim."""
        if self.aim:
            return self.aim
        bounds = (("at most", self.most), ("at least", self.least))
        return ", ".join(
            f"{word} {bound:g}{self.unit}" for word, bound in bounds if bound is not None
        )

    def reached(self, answer: Answer) -> str:
        """Whether each of its values is good enough; empty where there was no aim."""
        if not self.wanted:
            return ""
        within = all(
            (self.most is None or value <= self.most)
            and (self.least is None or value >= self.least)
            for value in answer.values
        )
        return "yes" if answer.values and within else "**no**"


def span(values: float | Iterable[float], places: int = 2) -> str:
    """One value, or the least and the largest."""
    every = [values] if isinstance(values, int | float) else [*values]
    return " to ".join(dict.fromkeys(f"{end:.{places}f}" for end in (min(every), max(every))))


def case(result: Any, **wanted: object) -> Any:
    """The one of `results` that has these keys."""
    for each in result["results"]:
        if all(each.get(key) == value for key, value in wanted.items()):
            return each
    raise LookupError(f"none has {wanted}")


def found(figure: Any, unit: str = "", places: int = 2, spread: str = "") -> Answer:
    """One value, or several."""
    values = (figure,) if isinstance(figure, int | float) else tuple(figure)
    return Answer(f"{span(values, places)}{unit}", spread, values)


def quartiles(figure: Any, places: int = 2) -> Answer:
    """A median with its quartiles."""
    return found(figure["median"], "", places, f"quartiles {span(figure['quartiles'], places)}")


def turns(ratios: list[float], places: int = 2) -> Answer:
    """The median of ratios of turns, with the least and the largest."""
    return found(statistics.median(ratios), "", places, f"turns {span(ratios, places)}")


def beside(theirs: list[float], ours: list[float]) -> list[float]:
    """Their time over ours, turn by turn."""
    return [one / other for one, other in zip(theirs, ours, strict=True)]


def noted(key: str, unit: str = "", places: int = 2, spread: str = "") -> Ask:
    """A figure that was written down; of a table, each with its name."""

    def ask(result: Any) -> Answer:
        figure = result[key]
        if not isinstance(figure, dict):
            return found(figure, unit, places, spread)
        words = ", ".join(f"{value:.{places}f} {name}" for name, value in figure.items())
        return Answer(words, spread, tuple(figure.values()))

    return ask
