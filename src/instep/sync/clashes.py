"""Which settings do not go together, and why: the one table, for the checks and for the page.

`docs/make_together.py` writes `docs/concepts/what-goes-together.md` from it. What a setting needs
by itself, and what its values may be, is checked where it is read. Ways in: `check`, `refusals`.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from instep.errors import SpecError, raise_first
from instep.job.spec import JobSpec
from instep.sync.settings import SETTINGS, Traits

_UNEQUAL = "its epochs have steps of unequal size"
AXES = ("shard", "tensor", "stages")
BY_LENGTH = ("tokens", "length_sampler")

_ONE_NOISE = "noise is added once, to the sum of the clipped gradients of a whole step"

_OWN_STEPS = "participants take steps of their own, and the workers never have a common gradient"
_OF_ALL = "the limit is of all parameters, and of all of a round"
_ON_THE_HOST = "servers and workers compute on the CPU"
_APART = "each micro-batch is computed apart, and nobody waits for those of other workers"
_TO_ANYBODY = "the server leases micro-batches to whoever is free, wherever their samples lie"
_SIGNS = "the norm of signs tells only how many there are; a lower learning rate limits a step"
_ONE_OPTIMIZER = "its strategy agrees on the gradient of one optimizer; all_reduce agrees on each"

_BY_LENGTH = {
    "averaging": "participants take local steps of train.global_batch samples",
    "leased": "the server leases micro-batches of train.global_batch samples",
    "parts": "windows are of the whole set, and its parts lie apart",
    "private": "how long a sample is would show when it is trained on",
    "sampler": _UNEQUAL,
    "stratified": "a batch has samples of one length, whatever their classes",
    "in_order": "samples are sorted by length within windows",
}

CLASHES: dict[tuple[str, str], str] = {
    ("averaging", "no_rounds"): "rounds encode segments of what each participant gives, in a fixed "
    "number of bytes",
    ("averaging", "batch_norm"): _OWN_STEPS,
    ("averaging", "float16"): _OWN_STEPS,
    ("averaging", "corruption"): _OWN_STEPS,
    ("averaging", "norm_rule"): _OWN_STEPS,
    ("averaging", "turns"): _ONE_OPTIMIZER,
    ("averaging", "batch_loss"): "participants take their steps apart, and the loss is of the "
    "global batch of all of them",
    ("own_data", "own_loop"): "only the data of a recipe are divided",
    ("start_after", "own_data"): "before the rounds all take the samples of a step together",
    ("start_after", "own_loop"): "a step of yours would be one of all first, and one of a "
    "participant then",
    ("local_parameters", "codec"): "what participants remember is with one worker then, and each "
    "worker validates for all",
    ("local_parameters", "streams"): "a fragment is of parameters that all share",
    ("local_parameters", "own_loop"): "your own loop has one model for all participants",
    ("streams", "local_optimizers"): "participants never begin anew",
    ("streams", "fraction"): "each participant has a model of its own all the time",
    ("streams", "start_after"): "before the rounds no participant has a model of its own",
    ("streams", "cuda"): "fragments are sent by another thread, which was tried on the CPU alone",
    ("streams", "own_loop"): "your loop would have to take up fragments in the middle of it",
    ("clip", "codec"): "what is clipped is summed as whole numbers",
    ("clip", "median"): "what is clipped is summed as whole numbers",
    ("clip", "streams"): _OF_ALL,
    ("clip", "local_parameters"): _OF_ALL,
    (
        "clip",
        "start_after",
    ): "the limit is of steps of a participant, and before the rounds is none",
    ("clip", "cuda"): "whole numbers are masked on the CPU",
    ("clip", "own_loop"): "only participants of a recipe are clipped",
    ("server_sync", "no_rounds"): "servers are sent segments, each in a fixed number of bytes",
    ("server_sync", "cuda"): _ON_THE_HOST,
    ("server_sync", "float16"): _ON_THE_HOST,
    ("server_sync", "corruption"): "it compares states that every worker has",
    (
        "server_sync",
        "ema",
    ): "servers move the parameters, and what they leave behind has no average",
    ("server_sync", "own_loop"): "your own loop calls the optimizer, which is on the servers",
    ("server_sync", "turns"): _ONE_OPTIMIZER,
    ("leased", "no_rounds"): "servers are sent segments, each in a fixed number of bytes",
    ("leased", "bits"): "the order of updates depends on timing",
    ("leased", "batch_norm"): _APART,
    ("leased", "cuda"): _ON_THE_HOST,
    ("leased", "float16"): _ON_THE_HOST,
    ("leased", "ema"): "what a server leaves to its successor has no average",
    ("leased", "corruption"): "it compares states that every worker has",
    ("leased", "norm_rule"): "each micro-batch has a gradient of its own, and a step has none",
    ("leased", "own_loop"): "your own loop calls the optimizer, which is on the server",
    ("leased", "turns"): _ONE_OPTIMIZER,
    ("leased", "batch_loss"): _APART,
    ("codec", "bits"): "what a codec drops depends on how many workers there are, unless it "
    "belongs to participants (averaging)",
    ("codec", "corruption"): "gradients are not compared to the bit",
    ("codec", "float16"): "the scale of the loss changes",
    ("codec", "turns"): "it carries over what it drops of a single gradient",
    ("sign_vote", "codec"): "votes are a bit already",
    ("sign_vote", "merge"): "each micro-batch is a voter, and is computed apart",
    ("sign_vote", "clipping"): _SIGNS,
    ("sign_vote", "norm_rule"): _SIGNS,
    ("sign_vote", "batch_norm"): "each micro-batch is a voter, and is computed apart",
    (
        "sign_vote",
        "float16",
    ): "the scale of the loss changes, and a voter's momentum is of many steps",
    (
        "sign_vote",
        "corruption",
    ): "it compares what every worker has, and a voter's momentum is on one",
    (
        "sign_vote",
        "own_loop",
    ): "a step that another worker may have committed cannot be finished in your own loop",
    ("sign_vote", "turns"): _ONE_OPTIMIZER,
    (
        "sign_vote",
        "batch_loss",
    ): "a micro-batch has no gradient of its own, whose sign could be a vote",
    ("shard", "sign_vote"): "its processes compute a micro-batch each in one pass, and each is a "
    "voter",
    ("delayed", "codec"): "it sends plain numbers",
    ("delayed", "float16"): "the scale of the loss changes",
    ("delayed", "corruption"): "a gradient is applied in a step whose passes did not compute it",
    ("delayed", "own_loop"): "a step that another worker may have committed cannot be finished in "
    "your own loop",
    ("delayed", "turns"): "it carries over a single gradient",
    ("ema", "own_loop"): "your own loop can have an AveragedModel, and the run does not validate",
    ("corruption", "turns"): "it repeats the pass of a single update",
    ("corruption", "batch_loss"): "it repeats passes of other workers, and the gradients of such a "
    "loss follow from the whole global batch",
    (
        "bits",
        "batch_norm",
    ): "the same bits need each micro-batch computed apart",  # also in `job/spec.py`
    ("batch_norm", "turns"): "it runs the whole batch of a worker as the one pass of a step",
    ("parts", "leased"): _TO_ANYBODY,
    (
        "parts",
        "corruption",
    ): "it repeats micro-batches of other workers, whose samples lie elsewhere",
    ("parts", "batch_norm"): "it runs the whole batch of a worker as one pass of neighbours",
    ("parts", "batch_loss"): "it runs the whole batch of a worker as one pass of neighbours",
    ("parts", "own_loop"): "only micro-batches of a recipe are dealt by where samples lie",
    ("private_samples", "averaging"): _ONE_NOISE,
    ("private_rounds", "median"): "noise is added to a sum",
    ("private_rounds", "streams"): _OF_ALL,
    ("private_rounds", "local_parameters"): "what participants keep is in checkpoints as it is",
    (
        "private_rounds",
        "start_after",
    ): "the limit is of steps of a participant, and before the rounds is none",
    ("private_rounds", "cuda"): "whole numbers are summed on the CPU",
    ("private_rounds", "clip"): "privacy.clip is the limit of how far a participant comes",
    ("private", "server_sync"): _ONE_NOISE,
    ("private", "leased"): _ONE_NOISE,
    ("private", "codec"): _ONE_NOISE,
    ("private", "sign_vote"): _ONE_NOISE,
    ("private", "delayed"): _ONE_NOISE,
    ("private", "merge"): "micro-batches are the units of a sum",
    ("private", "batch_norm"): "no layer may look at several samples",
    ("private", "float16"): "gradients are clipped in float32",
    ("private", "corruption"): "it compares gradients of samples",
    ("private", "parts"): "samples are to be drawn from the whole dataset",
    ("private", "own_loop"): "in your own loop no gradient of a single sample is known",
    ("private", "turns"): "noise is added once in a step",
    ("private", "batch_loss"): "a loss that compares samples gives no gradient of one alone",
    ("private", "balance"): "how likely a sample is drawn has to be the same for each",
    ("private", "sampler"): "how likely a sample is drawn has to be the same for each",
    ("balance", "own_data"): "each participant's classes are its own",
    ("balance", "parts"): "classes are mixed over the whole set, and its parts lie apart",
    ("balance", "own_loop"): "classes are those of a recipe; your loop can weigh its loss",
    ("sampler", "balance"): "both say how often samples come",
    ("sampler", "own_data"): _UNEQUAL,
    ("sampler", "parts"): _UNEQUAL,
    ("sampler", "leased"): _UNEQUAL,
    ("sampler", "start_after"): _UNEQUAL,
    ("private", "draws"): "how likely a sample is drawn has to be the same for each",
    ("draws", "balance"): "both say how often samples come",
    ("draws", "own_data"): "each participant has data of its own",
    ("draws", "parts"): "an epoch draws from the whole set, and its parts lie apart",
    ("reweight", "averaging"): _OWN_STEPS,
    ("reweight", "leased"): _APART,
    ("reweight", "stages"): "a pipeline cuts micro-batches, and weights are of whole ones",
    ("reweight", "turns"): "each turn has a loss of its own, which would have to weigh samples",
    ("reweight", "batch_loss"): "its loss is of the whole batch, and no sample has one of its own",
    ("sources", "balance"): "both say how often samples come",
    ("sources", "own_data"): "each participant has data of its own",
    ("sources", "parts"): "an epoch mixes all of them, and parts lie apart",
    ("sources", "own_loop"): "only the datasets of a recipe are mixed",
    ("sources", "private"): "how likely a sample is drawn has to be the same for each",
    ("iterable", "balance"): "how often a sample comes is planned from the classes of all",
    ("iterable", "tokens"): "batches of about one length are planned from the lengths of all",
    ("iterable", "own_data"): "participants share what it gives",
    ("iterable", "leased"): "the server leases micro-batches to whoever is free, and a part of a "
    "stream is read by one worker",
    ("iterable", "corruption"): "it repeats micro-batches of other workers, which read other parts",
    ("iterable", "private"): "samples are to be drawn from the whole dataset",
    ("iterable", "own_loop"): "only the stream of a recipe is divided",
    ("once", "sources"): "the streams of a mixture are read again where a process is lost",
    ("once", "own_loop"): "only the stream of a recipe is kept",
    ("tokens", "own_loop"): "your own DataLoader says how many samples an iteration has",
    ("learning_rates", "turns"): "it makes groups for a single optimizer; give them in "
    "Turn.optimizer",
} | {
    (axis, setting): why
    for setting, why in {
        "dgc": "its limit is of whole gradients, and a process of a replica has parts",
        "delayed": "its norm is of the gradient of another step",
        "streams": "a participant's own model is in one process",
        "local_parameters": "a process of a replica has parts of what a participant keeps",
        "clip": "no process has all of how far a participant came, by whose norm it is clipped",
        "start_after": "the gradient of a whole replica and that of a participant lie otherwise",
        "powersgd": "its factors are of whole matrices, and a process of a replica has parts",
        "server_sync": "servers share out whole parameters, and a process of a replica has parts",
        "leased": "servers share out whole parameters, and a process of a replica has parts",
        "ema": "the average is of whole parameters, and a process of a replica has parts",
        "float16": "the scale of the loss follows from whole gradients",
        "corruption": "it compares states that every worker has",
        "own_loop": "only the model of a recipe is split",
        "parts": "the processes of a replica share its micro-batches",
        "once": "the processes of a replica share its micro-batches, and one reads a part",
        "private": "no process has the whole gradient of a sample, by whose norm it is clipped",
        "turns": "the processes of a replica run the passes of one update together",
        "batch_loss": "it computes each batch twice, and the processes of a replica once",
    }.items()
    for axis in AXES
}
CLASHES |= {(other, by): why for by in BY_LENGTH for other, why in _BY_LENGTH.items()}
"""Pairs of settings, and why they do not go together."""


UNLESS = {("codec", "bits"): "averaging"} | {
    pair: "iterable" for pair in CLASHES if "parts" in pair
}
"""Pairs that do go together where a third setting is asked for: parts of a stream lie nowhere."""


def clashes(job: JobSpec, recipe: Traits | None = None) -> Iterator[tuple[str, str]]:
    """The pairs that a job asks for, and a recipe where it is known, and that clash."""
    built_later = recipe is None and not SETTINGS["own_loop"].asked(job, None)
    for pair in CLASHES:
        unless = UNLESS.get(pair, "")
        if unless == "iterable" and built_later:
            continue  # it shows then
        if not (unless and SETTINGS[unless].asked(job, recipe)) and all(
            SETTINGS[name].asked(job, recipe) for name in pair
        ):
            yield pair


def on_the_cpu(job: JobSpec) -> bool:
    """Whether something that a job asks for is computed on no GPU."""
    with_gpus = replace(job, train=replace(job.train, device="cuda"))
    return any("cuda" in pair for pair in clashes(with_gpus))


def refusals(job: JobSpec, recipe: Traits | None = None) -> Iterator[SpecError]:
    """The reasons why settings do not go together: one for each pair, with both and the reason.

    Args:
        job: what is asked for.
        recipe: the same; left out where it has not been built.
    """
    for pair in clashes(job, recipe):
        one, other = (SETTINGS[name].name.format(job=job) for name in pair)
        yield SpecError(
            f"{one} does not go with {other}: {CLASHES[pair]}. Leave one of the two out."
        )


def check(job: JobSpec, recipe: Traits | None = None) -> None:
    """Refuse settings that do not go together.

    Args:
        job, recipe: as for `refusals`.

    Raises:
        SpecError: naming two of them, and the reason.
    """
    raise_first(refusals(job, recipe))
