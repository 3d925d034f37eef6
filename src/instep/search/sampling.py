"""The values of trial n: a function of the search, n, and the trials that were told before it.

Optuna samples, in memory, with a sampler made anew for each trial from a key of its own: so no
generator needs to be kept, and the same trials come again whatever was killed in between. This is
the only module that imports Optuna, with `export.py`. Way in: `TrialSampler.values`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instep.errors import RunError, SpecError
from instep.job.search import Range, SearchSpec, Value
from instep.search.results import Result, ToldTrial, Values

if TYPE_CHECKING:
    from types import ModuleType


def optuna_module() -> ModuleType:
    """Optuna, without its own lines of progress.

    Raises:
        SpecError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise SpecError(
            "a search needs optuna, which is not installed: pip install 'instep[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    module: ModuleType = optuna
    return module


def key_of(seed: int, number: int) -> int:
    """The seed of the sampler of one trial."""
    digest = hashlib.sha256(f"instep search {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


class TrialSampler:
    """Chooses the values of trials.

    Args:
        spec: of the search.
        seed: of the job.
        upwards: whether a larger metric is better.

    Raises:
        SpecError: what samples is not installed.
    """

    def __init__(self, spec: SearchSpec, seed: int, *, upwards: bool) -> None:
        self._spec, self._seed, self._upwards = spec, seed, upwards
        self._ranges = spec.ranges
        self._trials: list[Any] = []  # of the study, by number
        self._told = 0  # how many of them
        _check_installed(spec.sampler)
        if spec.sampler not in ("grid", "qmc"):
            self._optuna = optuna_module()
            self._space = {
                key: distribution(self._optuna, each) for key, each in self._ranges.items()
            }
            self._study = self._new_study()

    @property
    def trials(self) -> int:
        """How many trials there are."""
        return self._spec.count

    def values(self, number: int, told: Sequence[ToldTrial], running: Sequence[Values]) -> Values:
        """The values of a trial.

        Args:
            number: of the trial.
            told: those before it that are told, from the first on.
            running: the values of the others before it.
        """
        if self._spec.sampler == "grid":
            point = next(itertools.islice(itertools.product(*self._spec.grid), number, None))
            return dict(zip(self._ranges, point, strict=True))
        if self._spec.sampler == "qmc":
            return self._of_sobol(number)
        return self._asked(number, told, running)

    def _of_sobol(self, number: int) -> Values:
        from scipy.stats.qmc import Sobol

        engine = Sobol(len(self._ranges), scramble=True, seed=key_of(self._seed, -1))
        (unit,) = engine.fast_forward(number).random(1).tolist() if number else engine.random(1)
        return {
            key: at(each, float(place))
            for (key, each), place in zip(self._ranges.items(), unit, strict=True)
        }

    def _asked(self, number: int, told: Sequence[ToldTrial], running: Sequence[Values]) -> Values:
        if self._spec.sampler == "random":
            trial = self._of_sampler(self._new_study(), number)
        else:
            trial = self._of_sampler(self._filled(told, running), number)
            self._trials.append(trial)
        chosen: Mapping[str, Value] = trial.params
        return {key: chosen[key] for key in self._ranges}

    def _of_sampler(self, study: Any, number: int) -> Any:
        """Ask for a trial, from a sampler with a key of its own."""
        samplers, seed = self._optuna.samplers, key_of(self._seed, number)
        quiet = {"warn_independent_sampling": False}
        match self._spec.sampler:
            case "random":
                study.sampler = samplers.RandomSampler(seed=seed)
            case "gp":
                import torch

                torch.set_num_threads(1)  # its sums are to be those of any machine
                study.sampler = samplers.GPSampler(seed=seed, **quiet)
            case "cmaes":
                study.sampler = samplers.CmaEsSampler(seed=seed, **quiet)
            case _:
                study.sampler = samplers.TPESampler(seed=seed)
        return study.ask(self._space)

    def _new_study(self) -> Any:
        return self._optuna.create_study(direction=direction(self._upwards))

    def _filled(self, told: Sequence[ToldTrial], running: Sequence[Values]) -> Any:
        """The study with exactly these trials, of which the first are told."""
        every = [*(each.values for each in told), *running]
        if len(self._trials) > len(every) or self._told > len(told):
            self._study, self._trials, self._told = self._new_study(), [], 0
        study, kinds = self._study, self._optuna.trial
        if self._spec.sampler == "cmaes":
            self._ask_again(every, told)
        for values in every[len(self._trials) :]:
            number = len(self._trials)
            study.add_trial(
                kinds.create_trial(
                    state=kinds.TrialState.RUNNING,
                    params=dict(values),
                    distributions=self._space,
                )
            )
            self._trials.append(
                kinds.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
            )
        self._tell(told)
        return study

    def _ask_again(self, every: Sequence[Values], told: Sequence[ToldTrial]) -> None:
        """Ask for the trials that an earlier process has asked for, each as it was asked for then.

        CMA-ES keeps what it has learnt with the trials of a study, and only asking brings it back.

        Raises:
            RunError: they are others, as another version chooses them.
        """
        for number in range(len(self._trials), len(every)):
            self._tell(told[: max(0, number - self._spec.width + 1)])
            trial = self._of_sampler(self._study, number)
            if trial.params != dict(every[number]):
                raise RunError(
                    f"trial {number} of this search was chosen by another version of optuna or "
                    "cmaes, and this one would not go on as it did. Install that one, or begin "
                    "another search with --name."
                )
            self._trials.append(trial)

    def _tell(self, told: Sequence[ToldTrial]) -> None:
        """Tell the study the results that it does not have yet."""
        for trial, each in zip(self._trials[self._told :], told[self._told :], strict=False):
            tell(self._optuna, self._study, trial, each.result)
        self._told = max(self._told, len(told))


_NEEDED = {"qmc": "scipy", "gp": "scipy", "cmaes": "cmaes"}
"""A package beside Optuna that a sampler needs."""


def _check_installed(sampler: str) -> None:
    """Refuse a sampler whose package is not there.

    Raises:
        SpecError: it says which to install.
    """
    package = _NEEDED.get(sampler)
    if package is not None and importlib.util.find_spec(package) is None:
        raise SpecError(
            f"sampler = {sampler!r} needs {package}, which is not installed: "
            "pip install 'instep[search]'"
        )


def distribution(optuna: ModuleType, values: Range) -> Any:
    """The values of a key, as Optuna has them."""
    kinds = optuna.distributions
    if values.choices:
        return kinds.CategoricalDistribution(values.choices)
    if values.whole:
        step = int(values.step or 1)
        return kinds.IntDistribution(int(values.low), int(values.high), values.log, step)
    return kinds.FloatDistribution(values.low, values.high, values.log, values.step)


def direction(upwards: bool) -> str:
    """Which way is better, in Optuna's words."""
    return "maximize" if upwards else "minimize"


def tell(optuna: ModuleType, study: Any, trial: Any, result: Result) -> None:
    """Tell a study what a trial has come to."""
    states = optuna.trial.TrialState
    for rung, value in result.rungs:
        trial.report(value, rung)
    if result.state == "completed":
        study.tell(trial, result.value)
    else:
        study.tell(trial, state=states.PRUNED if result.state == "pruned" else states.FAIL)


def frozen(optuna: ModuleType, space: Mapping[str, Any], told: ToldTrial) -> Any:
    """A told trial, as Optuna has it in a study that is only looked at."""
    result, states = told.result, optuna.trial.TrialState
    state = {"completed": states.COMPLETE, "pruned": states.PRUNED}.get(result.state, states.FAIL)
    return optuna.trial.create_trial(
        state=state,
        value=result.value if state != states.FAIL else None,
        params=dict(told.values),
        distributions=dict(space),
        intermediate_values=dict(result.rungs),
        user_attrs={"parameters_sha256": result.parameters_sha256, "seconds": result.seconds},
    )


def at(values: Range, place: float) -> Value:
    """The value at a place in [0, 1)."""
    if values.choices:
        return values.choices[int(place * len(values.choices))]
    low, high = values.low, values.high
    if values.whole or values.step:
        step = values.step or 1
        if not values.log:
            number = int(place * (math.floor((high - low) / step + 1e-9) + 1))
            return int(low + number * step) if values.whole else low + number * step
        low, high = low - 0.5, high + 0.5
    if values.log:
        found = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
    else:
        found = low + place * (high - low)
    if values.whole:
        return int(min(max(round(found), values.low), values.high))
    return min(max(found, values.low), values.high)
