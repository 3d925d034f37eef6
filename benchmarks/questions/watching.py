"""The page in the browser: how late it is, and what it costs."""

from typing import Any

from questions.base import Answer, Question, found


def canvas(result: Any) -> Answer:
    late = result["canvas"]
    return found(late["median_s"], " s", 2, f"99 % within {late['p99_s']} s, {late['steps']} steps")


def share(result: Any) -> Answer:
    watched = result["watched"][-1]
    memory = f"{watched['pages']} pages, {watched['memory_mb']:.0f} MB"
    return found(100 * watched["share_of_a_core"], " %", 1, memory)


def memory(result: Any) -> Answer:
    watched = result["watched"][-1]
    return found(watched["memory_mb"], " MB", 0, f"{watched['pages']} pages")


def listed(result: Any) -> Answer:
    many = result["many"]["listed"]
    spread = f"in Chromium; {many['cpu_s']} s of the server's processor time"
    return found(result["many"]["seen"]["listed_s"], " s", 1, spread)


def overlaid(result: Any) -> Answer:
    many = result["many"]["overlaid"]
    spread = f"in Chromium; {many['cpu_s']} s of the server's processor time"
    return found(result["many"]["seen"]["overlaid_s"], " s", 1, spread)


def opened(result: Any) -> Answer:
    long = result["long"]
    spread = f"{long['cpu_s']} s of processor time, {long['bytes'] / 1000:.0f} kB"
    return found(long["first_message_s"], " s", 1, spread)


def page(result: Any) -> Answer:
    return found(result["page_bytes_compressed"] / 1000, " kB", 0)


def slowed(result: Any) -> Answer:
    seen = result["results"][0]
    ratio = seen["watched over not"]
    spread = f"95 %: {ratio['low']:.3f} to {ratio['high']:.3f}, {seen['rounds']} rounds"
    return found(ratio["mean"], "", 3, spread)


def back(result: Any) -> Answer:
    seen = result["results"][0]
    within = f"{seen['within_2_s']} of {seen['kills']} within 2 s"
    spread = f"median {seen['back_s']['median']:.1f} s, {within}"
    return found(seen["back_s"]["most"], " s", 1, spread)


QUESTIONS = (
    Question(
        "from a committed step to the curve on the canvas",
        "dashboard",
        "dashboard",
        canvas,
        most=0.7,
        unit=" s",
    ),
    Question(
        "the server, 16 workers of 20 steps a second: of a core",
        "dashboard",
        "dashboard",
        share,
        most=3,
        unit=" %",
    ),
    Question("its memory", "dashboard", "dashboard", memory, most=80, unit=" MB"),
    Question(
        "a list of 1,000 runs, the first time", "dashboard", "dashboard", listed, most=1, unit=" s"
    ),
    Question(
        "250 runs laid over each other", "dashboard", "dashboard", overlaid, most=2, unit=" s"
    ),
    Question(
        "a run of ten million steps is opened", "dashboard", "dashboard", opened, most=1, unit=" s"
    ),
    Question(
        "the page and all it is made of, compressed",
        "dashboard",
        "dashboard",
        page,
        most=120,
        unit=" kB",
    ),
    Question(
        "a step of a run that three pages watch: time",
        "dashboard",
        "dashboard-beside",
        slowed,
        beside="the same run, not watched",
        most=1.005,
    ),
    Question(
        "server, master or run is killed: the page is right again, at most",
        "dashboard",
        "dashboard-kills",
        back,
        most=2,
        unit=" s",
    ),
)
