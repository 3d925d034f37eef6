"""What a round is: the options of `[sync.options]` that all strategies with rounds share."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from instep.job.base import Natural, Positive, Section

SHARED = "none"
"""The partition of data that all participants share."""


class RoundSpec(Section, frozen=True, kw_only=True):
    """Options of the strategies with rounds that say what a round is."""

    local_steps: Positive = 10
    """How many steps a participant takes in a round, before all are averaged."""

    local_optimizers: Literal["reset", "kept"] = "reset"
    """Whether a participant's optimizer state (moments, momentum) is dropped at the end of a
    round, or kept for its next one."""

    start_after: Natural = 0
    """How many steps all take together, as with `all_reduce`, before the first round (post-local
    SGD). They count as steps of the job, as a round does."""

    fragments: Positive = 1
    """Of `diloco`: into how many parts the parameters are cut, of which one after the other agrees,
    while participants go on (Streaming DiLoCo). A commit is then `local_steps` / `fragments` local
    steps, and the agreement of one of them."""

    delay: Natural = 0
    """With `fragments`: so many local steps participants take while a fragment is under way."""

    fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """How much of the participants are in a round; which, is drawn for each by the seed."""

    local_parameters: tuple[str, ...] = ()
    """Patterns of names, such as `["*.norm.*"]`: parameters and buffers that stay with their
    participant, and are not shared (FedBN). The shared model has their mean."""

    partition: str = SHARED
    """Whose data are whose: `none`, all participants share them; or `blocks`, `random`, `labels`,
    `owner`, `parts` (of `data.parts`): each has some of its own."""

    skew: Annotated[float, Meta(gt=0)] = 0.5
    """Of `partition = "labels"`: 100 is near even, 0.1 severe."""

    clip: Annotated[float, Meta(ge=0)] = 0.0
    """Limit of the norm of how far a participant comes in a round, over all parameters: one that
    came farther gives less. 0 for none. Needs `train.determinism = "bits"`."""

    secure_sums: bool = False
    """Whether participants mask what they give, so that nobody sees more than the sum. Needs `clip`
    and `partition`."""

    least: Natural = 0
    """With `secure_sums`: of how many participants a sum is at least; more than half of those in a
    round. 0 for the fewest that is."""


ROUND_OPTIONS = {
    "local_steps": "needs a whole number of at least 1",
    "local_optimizers": "needs to be 'reset' or 'kept'",
    "start_after": "needs a whole number of at least 0",
    "fragments": "needs a whole number of at least 1",
    "delay": "needs a whole number of at least 0",
    "fraction": "needs a number above 0, and at most 1",
    "local_parameters": "needs a list of patterns of names, such as ['*.norm.*']",
    "partition": "needs the name of a partition, such as 'blocks', in quotes",
    "skew": "needs a number above 0",
    "clip": "needs a number above 0; leave it out for no limit",
    "secure_sums": "needs to be true or false",
    "least": "needs a whole number of at least 0",
}
"""What each needs to be."""

OF_FRAGMENTS = frozenset({"fragments", "delay"})
"""Those of them that only strategies with fragments know."""
