"""Preparing, reading and placing data."""

import statistics
from typing import Any

from questions.base import Answer, Ask, Question, found, noted, span


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
    every = {name: result[f"{name}_mb"] for name in ("json", "csv") if f"{name}_mb" in result}
    each = [f"{name.upper()} {_sizes(sizes)}" for name, sizes in every.items()]
    most = max(mb for sizes in every.values() for mb in sizes.values())
    return found(most, " MB", 0, "; ".join(each))


def _sizes(mb: dict[str, float]) -> str:
    return ", ".join(f"{size} {each:.0f}" for size, each in mb.items())


def by_tokens(result: Any) -> Answer:
    ours, theirs = (result["results"][way]["over_fixed"] for way in ("tokens", "hugging face"))
    spread = f"{span(ours)}, `group_by_length` {span(theirs)}; {result['seeds']} seeds"
    return found(statistics.median(ours), "", 2, spread)


def padding(result: Any) -> Answer:
    every = {way: 100 * each["padding"] for way, each in result["results"].items()}
    spread = "`group_by_length` {hugging face:.1f} %, as many samples {fixed:.0f} %"
    return found(every["tokens"], " %", 1, spread.format(**every))


def waves(result: Any) -> Answer:
    ours, theirs = (result["results"][way]["correlation"] for way in ("tokens", "hugging face"))
    return found(abs(ours), "", 2, f"`group_by_length` {theirs:.2f}")


def loss_by_tokens(result: Any) -> Answer:
    """By how many deviations of the seeds its mean loss is above that of fixed sizes."""
    ours, fixed = (result["results"][way] for way in ("tokens", "fixed"))
    away = (ours["loss"] - fixed["loss"]) / fixed["loss_deviation"]
    theirs = result["results"]["hugging face"]["loss"]
    spread = f"{ours['loss']:.3f}, fixed {fixed['loss']:.3f}, `group_by_length` {theirs:.3f}"
    return found(away, " deviations above", 1, spread)


def first_batch(result: Any) -> Answer:
    every = [result["before"]["global"]["mb"], result["windowed"]["mb"]]
    spread = "{:.0f} before pages were let go; {:.0f} in the windowed order".format(*every)
    return found(result["global"]["mb"], " MB", 0, spread)


def _of_a_billion(result: Any) -> list[tuple[str, Any]]:
    """Those that torch does not limit to fewer."""
    return [(way, each) for way, each in result["results"].items() if each["samples"] >= 10**9]


def planned_epoch(result: Any) -> Answer:
    every = {way: max(each["epoch_cpu_s"]) for way, each in _of_a_billion(result)}
    longest = max(every, key=lambda way: every[way])
    return found(every[longest], " s", 3, f"{len(every)} ways; the longest is `{longest}`")


def planned_memory(result: Any) -> Answer:
    every = {way: each["mb"] for way, each in _of_a_billion(result)}
    most = max(every, key=lambda way: every[way])
    return found(every[most], " MB", 0, f"{len(every)} ways; the most has `{most}`")


def disturbed(*kinds: str) -> Ask:
    """How many kinds of data were trained on otherwise than planned, or than undisturbed."""

    def ask(result: Any) -> Answer:
        every = [result["results"][kind] for kind in kinds if kind in result["results"]]
        if not every:
            raise LookupError(f"none of {kinds}")
        wrong = sum(not _as_planned(each) for each in every)
        kills, sizes = (sum(each[key] for each in every) for key in ("kills", "resizes"))
        return found(wrong, f" of {len(every)} ways", 0, f"{kills} kills, {sizes} other sizes")

    return ask


def _as_planned(each: Any) -> bool:
    run = each["run"]
    contents = run["contents"]  # of a stream that comes once they are in `same`
    right = "wrong" not in contents or (contents["compared"] and not contents["wrong"])
    return bool(each["same"] and right and not run["missing_samples"] + run["repeated_samples"])


def stream_continued(result: Any) -> Answer:
    times = result["results"]["continued"]["with_state_s"]
    return found(max(times), " s", 2, f"the longest of {len(times)}")


def beside_states(result: Any) -> Answer:
    told = result["results"]["continued"]
    return found(told["bytes_beside_states"], " bytes", 0, f"{told['windows_kept']} states")


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
        "JSON lines and CSV of 1 to 4 GB: most memory of a process",
        "preparing",
        "preparing-memory",
        memory,
        most=300,
        unit=" MB",
    ),
    Question(
        "first batch of 512 from 10^9 samples in 10^4 shards: memory, mapped pages included",
        "preparing",
        "first-batch",
        first_batch,
        most=50,
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
        "an epoch of 10^9 samples is planned and a batch taken: processor time",
        "planned",
        "billion",
        planned_epoch,
        most=1,
        unit=" s",
    ),
    Question(
        "the same: memory, the counts of classes included",
        "planned",
        "billion",
        planned_memory,
        most=100,
        unit=" MB",
    ),
    Question(
        "streams, workers and readers killed, and in changing numbers: others than planned",
        "planned",
        "streams",
        disturbed("with_state", "without_state", "mixed", "once"),
        "an undisturbed run; a plain read",
        most=0,
        aim="none",
    ),
    Question(
        "classes resampled, a `WeightedRandomSampler`, batches by length: the same",
        "planned",
        "streams",
        disturbed("resample", "sampler", "lengths"),
        "an undisturbed run; a plain read",
        most=0,
        aim="none",
    ),
    Question(
        "a stream with a state is continued after 10^6 samples: time to the first",
        "planned",
        "streams",
        stream_continued,
        most=1,
        unit=" s",
    ),
    Question(
        "the same: what is kept of a part beside the states",
        "planned",
        "streams",
        beside_states,
        most=1000,
        unit=" bytes",
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
    Question(
        "texts of very unequal length, `train.tokens_per_batch`: tokens per second",
        "lengths",
        "lengths",
        by_tokens,
        "as many samples in each batch",
        least=1.15,
    ),
    Question("the same: padding", "lengths", "lengths", padding, most=4, unit=" %"),
    Question(
        "the same: correlation of the lengths of neighbouring batches",
        "lengths",
        "lengths",
        waves,
        most=0.15,
    ),
    Question(
        "the same: loss on other texts after the same tokens, in deviations of the seeds",
        "lengths",
        "lengths",
        loss_by_tokens,
        "as many samples in each batch",
        most=2,
    ),
)
