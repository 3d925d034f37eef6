"""What bytes cost, on emulated hosts with links of 100 Mbit/s."""

import statistics
from typing import Any

from questions.base import Answer, Ask, Question, beside, case, found, span, turns


def exchange(name: str) -> Ask:
    return lambda result: turns(case(result, name=name)["faster"])


def servers(name: str) -> Ask:
    def ask(result: Any) -> Answer:
        first = case(result, rank=0)
        return turns(beside(first["all-reduce"]["seconds"], first[name]["seconds"]))

    return ask


def link_of_one_server(result: Any) -> Answer:
    """Four workers send it all that they have; 100 Mbit/s are 12.5 MB/s."""
    first = case(result, rank=0)
    received = 4 * (first["megabytes"] << 20)
    shares = [100 * received / seconds / 12.5e6 for seconds in first["1 server"]["seconds"]]
    return found(statistics.median(shares), " %", 1, f"turns {span(shares, 1)} %")


def leased(servers: int) -> Ask:
    def ask(result: Any) -> Answer:
        rates = result["updates_per_s"]
        ratio = statistics.mean(rates[str(servers)]) / statistics.mean(rates["1"])
        return found(ratio, "", 2, f"means of {len(rates['1'])} rounds")

    return ask


def leased_codec(result: Any) -> Answer:
    rates = {
        each["codec"]: each["updates_per_s"] for each in result["cases"] if each["servers"] == 1
    }
    ratio = statistics.mean(rates["int8"]) / statistics.mean(rates["none"])
    return found(ratio, "", 1, f"means of {len(rates['int8'])} rounds")


def encoder(name: str) -> Ask:
    def ask(result: Any) -> Answer:
        one = result["codecs"][name]["encode, error feedback"]
        return found(one["of_copy"], spread=f"quartiles {span(one['quartiles'])}")

    return ask


def convergence(name: str) -> Ask:
    def ask(result: Any) -> Answer:
        one = case(result, name=name)
        mean, *ends = one["ratio"]
        return found(mean, spread=f"{len(one['steps'])} seeds, 95 %: {span(ends)}")

    return ask


def worth_it(load: str) -> Ask:
    """The best of plain DDP over the best of ours."""

    def ask(result: Any) -> Answer:
        best: dict[bool, float] = {}
        for each in result["results"]:
            name, _, options = each["contender"].partition(":")
            ours = name == "instep"
            chosen = ours or (name == "ddp" and not options)
            if chosen and each["seconds"] and (each["load"], each["rate"]) == (load, "100mbit"):
                best[ours] = min(each["seconds"], best.get(ours, each["seconds"]))
        spread = f"{best[False]:.0f} s and {best[True]:.0f} s, one seed"
        return found(best[False] / best[True], " times as fast", 1, spread)

    return ask


def streaming(what: str, unit: str = "", places: int = 2, times: float = 1) -> Ask:
    names = ("fragments, delay", "fragments, whole delay")
    return lambda result: found(
        [times * result["found"][name][what] for name in names], unit, places, "two delays"
    )


def byte_counts(what: str) -> Ask:
    def ask(result: Any) -> Answer:
        every = [each[what] for each in result["results"] if what in each]
        values = tuple(100 * abs(each - 1) for each in every)
        spread = f"{len(every)} strategies and codecs"
        return Answer(f"at most {max(values):.1f} % off", spread, values)

    return ask


def forwarder(result: Any) -> Answer:
    shares = [100 * each for each in result["links"]["100mbit"]["core_share_of_a_forwarder"]]
    return found(shares, " % of a core", 1, f"{len(shares)} turns")


def encrypted(result: Any) -> Answer:
    over = result["links"]["100mbit"]["encrypted_over_private"]
    return found(over["median"], spread=f"turns {span((over['lowest'], over['highest']))}")


GLOO = "gloo's all-reduce of float32"
DDP = "DDP at its best rate"
PLAIN = "plain numbers"

QUESTIONS = (
    Question(
        "the same validation loss, an MLP of 4.2 million: `averaging` with int4",
        "worth_it",
        "worth-it.*",
        worth_it("mlp"),
        DDP,
    ),
    Question(
        "the same, a GPT of 0.4 million", "worth_it", "worth-it.*", worth_it("gpt"), DDP, least=4
    ),
    Question(
        "an all-reduce of 64 MB in int8", "exchange", "exchange", exchange("int8"), GLOO, least=3.7
    ),
    Question("the same in int4", "exchange", "exchange", exchange("int4"), GLOO),
    Question(
        "float32 by way of the hosts, two processes on each",
        "exchange",
        "exchange-over-hosts",
        exchange("over hosts float32"),
        "gloo's ring",
    ),
    Question(
        "a step with four servers",
        "servers",
        "servers",
        servers("4 servers"),
        "all-reduce",
        least=1.2,
    ),
    Question(
        "the same with int8",
        "servers",
        "coded-servers",
        servers("4 servers, int8"),
        "plain all-reduce",
    ),
    Question(
        "the link of one server, each way",
        "servers",
        "servers",
        link_of_one_server,
        "what it carries",
        least=90,
        unit=" %",
    ),
    Question(
        "updates a second of four servers without lockstep",
        "leased_servers",
        "leased-servers",
        leased(4),
        "one server",
    ),
    Question(
        "the same of one server with int8", "leased_servers", "leased-codecs", leased_codec, PLAIN
    ),
    Question(
        "steps to the same loss with int8",
        "convergence",
        "convergence",
        convergence("int8"),
        PLAIN,
        most=1.03,
    ),
    Question(
        "the same with int4",
        "convergence",
        "convergence-int4",
        convergence("int4"),
        PLAIN,
        most=1.08,
    ),
    Question(
        "the same with `diloco` and int4",
        "convergence",
        "convergence-int4",
        convergence("diloco, int4"),
        PLAIN,
        most=1.44,
    ),
    Question(
        "encoding int8 on one core, with error feedback: speed",
        "encoders",
        "encoders",
        encoder("int8"),
        "a copy of memory",
        least=0.7,
    ),
    Question("the same, int4", "encoders", "encoders", encoder("int4"), "a copy of memory"),
    Question(
        "streaming DiLoCo: share of time in the exchange",
        "streaming",
        "streaming",
        streaming("stall", " %", 1, 100),
        most=2,
        unit=" %",
    ),
    Question(
        "the same: most bytes of a turn",
        "streaming",
        "streaming",
        streaming("peak", "", 3),
        "their mean",
        most=1.2,
    ),
    Question(
        "bytes that a run counts",
        "bytes_on_the_wire",
        "bytes",
        byte_counts("own_over_kernel"),
        "the kernel's count",
        most=2,
        unit=" %",
    ),
    Question(
        "bytes that the kernel counts",
        "bytes_on_the_wire",
        "bytes",
        byte_counts("kernel_over_theory"),
        "theory",
        most=5,
        unit=" %",
    ),
    Question(
        "a process that encrypts",
        "encryption",
        "encryption(-again)?",
        forwarder,
        most=10,
        unit=" %",
    ),
    Question(
        "a step between encrypted hosts",
        "encryption",
        "encryption(-again)?",
        encrypted,
        "not encrypted",
    ),
)
