"""Preparing, reading and placing data."""

from typing import Any

from questions.base import Answer, Question, found, noted


def data_parts(result: Any) -> Answer:
    names = ("parts", "by speed", "copies")
    every = [100 * result["results"][name]["share_of_the_set_per_epoch"] for name in names]
    return found(every, " % of the set", 2, "dealt evenly, by speed, and with a host lost")


def mixing(result: Any) -> Answer:
    both = [result["results"][f"shuffled once, {order}"] for order in ("windowed", "global")]
    ours, theirs = (each["chi_square"] for each in both)
    return found(ours, "", 3, f"the global order {theirs:.3f}")


def shards_read(result: Any) -> Answer:
    read = result["shards_read_over_the_set"]
    spread = f"the global order {read['global']['4']:.0f} times"
    return found(read["windowed"]["4"], " times", 0, spread)


def remote_shards(result: Any) -> Answer:
    spread = (
        f"{result['remote_ms']:.1f} ms beside {result['local_ms']:.1f} ms, {result['turns']} turns"
    )
    return found(result["remote_ms"] / result["local_ms"], spread=spread)


HUGGING_FACE = "Hugging Face `datasets`, two processes"

QUESTIONS = (
    Question(
        "`instep prepare` with two workers, 100 MB to arrays: times as fast",
        "preparing",
        "preparing",
        noted("over_datasets", "", 1, "one turn"),
        HUGGING_FACE,
    ),
    Question(
        "2 GB with two workers: times as fast",
        "preparing",
        "preparing-2-gb",
        noted("one_over_two", "", 2, "one and three turns"),
        "one worker",
    ),
    Question(
        "2 GB of Parquet to Arrow: speed",
        "preparing",
        "preparing-2-gb",
        noted("parquet_of_cp", "", 2, "three turns"),
        "`cp` of the result",
        least=0.6,
    ),
    Question(
        "a batch of 64 samples from shards that came from a URL: time",
        "preparing",
        "remote-shards",
        remote_shards,
        "a folder",
    ),
    Question(
        "what of a dataset in parts crosses the network in an epoch",
        "parts",
        "parts",
        data_parts,
        most=5,
        unit=" %",
    ),
    Question(
        "classes of a batch in the windowed order: chi-square",
        "windowed",
        "windowed",
        mixing,
        "1 is random",
    ),
    Question(
        "shards that four hosts read in an epoch, windowed",
        "windowed",
        "windowed",
        shards_read,
        "the set",
    ),
)
