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


def beside_datasets(result: Any) -> Answer:
    every = [result[kind]["datasets_over_two"] for kind in ("json", "csv", "tokens")]
    spread = "JSON lines {:.1f}, CSV {:.1f}, tokens {:.1f}; one turn".format(*every)
    return found(every, "", 1, spread)


def parquet(result: Any) -> Answer:
    synced = result["cp_synced_over_two"]
    return found(
        result["cp_over_two"], "", 2, f"of a `cp` that lies on the disk {synced}, two turns"
    )


def memory(result: Any) -> Answer:
    every = result["json_mb"]
    spread = ", ".join(f"{size} {each}" for size, each in every.items())
    return found(max(every.values()), " MB", 0, spread)


HUGGING_FACE = "Hugging Face `datasets`, two processes"

QUESTIONS = (
    Question(
        "`instep prepare` with two workers, 100 MB to arrays and tokens: times as fast",
        "preparing",
        "preparing",
        beside_datasets,
        HUGGING_FACE,
        least=1.2,
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
        "preparing-parquet",
        parquet,
        "`cp` of the result",
        least=0.6,
    ),
    Question(
        "JSON lines of 1 to 4 GB: most memory of a process",
        "preparing",
        "preparing-memory",
        memory,
        most=300,
        unit=" MB",
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
