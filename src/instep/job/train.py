"""The tables `[train]` and `[stop]` of a job."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from instep.job.base import Natural, Positive, Section
from instep.units import seconds_in


class TrainSpec(Section, frozen=True, kw_only=True):
    """How long to train, in which portions, and how exactly."""

    epochs: Positive | None = None
    """Passes over the training data; 10 if neither this nor `steps` is given."""

    steps: Positive | None = None
    """Updates of the parameters, instead of `epochs`."""

    global_batch: Positive = 64
    """Samples of one step, over all workers together."""

    tokens_per_batch: Positive | None = None
    """Tokens of one step at most, on average, instead of samples: samples of about one length are
    put together. Needs `data.length` or `Recipe.length`. `global_batch` is of validations then."""

    micro_batches: Positive = 8
    """Parts of a global batch, in which work is distributed. Fixed for the job."""

    merge: Literal["auto", "always", "never"] = "auto"
    """Whether a worker runs its micro-batches as one larger forward pass: `auto` if a trial
    shows that no layer can tell the difference, `never` to save memory."""

    batch_norm: Literal["micro_batch", "global"] = "micro_batch"
    """What batch normalisation sees: each micro-batch, or the `global` batch of the step, over all
    workers. With `global` a worker runs its micro-batches as one pass, and the workers wait for
    each other in every such layer."""

    deal: Literal["speed", "even"] = "speed"
    """How work is distributed: `speed` gives a slow worker, or with `[mesh]` a slow replica, fewer
    micro-batches, `even` gives all the same number. Your own loop always has `even`."""

    determinism: Literal["order", "bits"] = "order"
    """`order`: the same global batches at any number of workers, results equal to rounding.
    `bits`: the same parameters, bit for bit."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number type of the forward pass (autocast); `float16` scales the loss and needs CUDA."""

    max_grad_norm: Annotated[float, Meta(gt=0)] | None = None
    """Clip the gradient to this global norm."""

    ema: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Keep a moving average of the parameters with this decay, such as 0.999, moved at each step.
    The run validates with it, and saves it as `model.safetensors`; checkpoints have both."""

    validate_every: Natural = 0
    """Steps between validations; 0: validate at the end of every epoch."""

    stop_after_steps: Natural = 0
    """Above 0: stop cleanly after this step, resumable. A resumed run forgets it."""

    threads: Natural = 0
    """Threads of each worker; 0: divide the machine's cores evenly."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto`: a GPU for each worker if there are enough and all that is asked for
    goes there, otherwise the CPU."""

    @property
    def passes(self) -> int:
        """Epochs of a job that does not count steps."""
        return self.epochs or 10

    @property
    def validation_batch(self) -> int:
        """Samples of a batch of a validation."""
        return -(-self.global_batch // (self.micro_batches if self.merge == "never" else 1))

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"both epochs = {self.epochs} and steps = {self.steps} are given: "
                "a run has one length. Leave one of them out."
            )
        if self.determinism == "bits" and self.merge == "always":
            raise ValueError(
                "merge = 'always' with determinism = 'bits': for the same bits each micro-batch is "
                "computed separately. Leave merge out."
            )
        if self.batch_norm == "global" and self.determinism == "bits":
            raise ValueError(
                "batch_norm = 'global' with determinism = 'bits': the same bits need each "
                "micro-batch computed apart. Leave one of them out."
            )
        if self.batch_norm == "global" and self.merge == "never":
            raise ValueError(
                "batch_norm = 'global' with merge = 'never': a worker's micro-batches are one "
                "pass, as a layer needs all of them at once. Leave merge out."
            )
        if self.max_grad_norm is not None and not math.isfinite(self.max_grad_norm):
            raise ValueError(f"max_grad_norm = {self.max_grad_norm}: needs to be a finite number.")


class StopSpec(Section, frozen=True, kw_only=True):
    """When to stop before the run reaches its length. A rule that is not set never fires."""

    metric: str = "loss"
    """The metric of each validation that `target` and `patience` watch: `loss`, or one of the
    recipe."""

    mode: Literal["auto", "min", "max"] = "auto"
    """Whether small or large is better; `auto` is `min` for `loss` and `max` for all others."""

    target: float | None = None
    """Stop at the validation in which the metric reaches this value."""

    patience: Natural = 0
    """Stop after this many validations in a row without an improvement; 0: never."""

    least_change: Annotated[float, Meta(ge=0)] = 0.0
    """The smallest improvement of the metric that resets `patience`."""

    bounds: tuple[tuple[Positive, float], ...] = ()
    """Pairs of a validation's number and a value: stop if the metric of that validation is worse
    than the value. `[[1, 0.6], [3, 0.8]]` looks at the first and at the third."""

    non_finite: bool = True
    """Stop if the loss is not finite, or the norm of the gradient if it is computed anyway; false:
    only warn."""

    rise: Annotated[float, Meta(gt=1)] | None = None
    """Stop if the mean loss of the last `window` steps exceeds the lowest so far so many times."""

    window: Positive = 100
    """Steps over which `rise` takes the mean."""

    gradient_norm: Annotated[float, Meta(gt=0)] | None = None
    """Stop if the global norm of the gradient, before clipping, is below this."""

    spread: Annotated[float, Meta(gt=0)] | None = None
    """Of the strategies with rounds: stop if the participants are this many times as far from their
    mean as the mean has moved in the round."""

    time_limit: str | Annotated[float, Meta(gt=0)] | None = None
    """Stop when the whole run has taken this long: `"90s"`, `"30m"`, `"1h30m"`, or seconds."""

    @property
    def time_limit_s(self) -> float | None:
        """The time limit in seconds."""
        return seconds_in(self.time_limit) if isinstance(self.time_limit, str) else self.time_limit

    @property
    def upwards(self) -> bool:
        """Whether a larger value of the metric is a better one."""
        return self.mode == "max" or (self.mode == "auto" and self.metric != "loss")

    @property
    def by_metric(self) -> bool:
        """Whether a rule looks at validations."""
        return self.target is not None or self.patience > 0 or bool(self.bounds)

    @property
    def by_step(self) -> bool:
        """Whether a rule needs the master at every step."""
        return self.by_norm or self.rise is not None

    @property
    def by_norm(self) -> bool:
        """Whether a rule needs the norm of the gradient."""
        return self.gradient_norm is not None

    def __post_init__(self) -> None:
        for name in ("target", "least_change", "rise", "gradient_norm", "spread", "time_limit"):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} = {value}: needs to be a finite number.")
        numbers = [number for number, _ in self.bounds]
        if numbers != sorted(set(numbers)) or not all(math.isfinite(b) for _, b in self.bounds):
            raise ValueError(
                f"bounds = {[[*pair] for pair in self.bounds]}: needs each validation once, in "
                "order, and a finite number for each."
            )
        try:
            positive = self.time_limit_s is None or self.time_limit_s > 0
        except ValueError:
            positive = False
        if not positive:
            raise ValueError(
                f"time_limit = {self.time_limit!r}: needs a length of time above 0, "
                "such as '90s', '30m' or '1h30m'."
            )
