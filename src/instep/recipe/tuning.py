"""Fine-tuning: load a file, freeze parameters, add adapters, and set learning rates by pattern.

Patterns are those of `patterns.py`. Way in: `begin` once the model is built, `groups` for the
optimizer, `check_rates` once it is made. Processes and steps are not known here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from instep.errors import RecipeError, SpecError
from instep.job.start import LoraSpec, StartSpec
from instep.recipe import lora
from instep.recipe.start.file import start_file
from instep.recipe.start.patterns import Names, matched_by, matches, matches_nothing, names_of
from instep.state.export.adapter import adapted_layers
from instep.state.files.sharded import files_of
from instep.state.load import Fit, fit_model


@dataclass(frozen=True)
class Loaded:
    """The file that a model was loaded from, and which tensors matched."""

    fit: Fit

    def fields(self) -> dict[str, Any]:
        """The fields of the event `model_loaded`; reads the file, for its hash. That of several is
        the hash of theirs, the index first."""
        path, report, *_ = self.fit
        digests = list[str]()
        for each in files_of(path):
            with each.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        several = hashlib.sha256("".join(digests).encode()).hexdigest()
        return {
            "path": str(path),
            "matched": len(report.matched),
            "missing": list(report.missing),
            "unexpected": list(report.unexpected),
            "wrong": report.wrong,
            "sha256": several if len(digests) > 1 else digests[0],
            "text": str(report),
        }


class Begun(NamedTuple):
    """What was done to a model before training."""

    loaded: Loaded | None
    """The file that it was loaded from, if any."""

    adapted: lora.Adapted | None
    """What has an adapter, if anything has."""

    rated: tuple[str | None, ...] = ()
    """The groups of its parameters that learning rates make, by pattern; None: of the others. A
    process that has only a part of the model makes the same groups."""

    small: bool = True
    """Whether one process may copy and try the whole model."""

    empty: bool = False
    """Whether the model is on the meta device."""

    def fill(self, model: nn.Module) -> None:
        """Copy the values of the file into the model, or a part of it, that was built without and
        has memory now."""
        if self.empty and self.loaded is not None:
            self.loaded.fit.fill(model)


NOTHING = Begun(None, None)


def begin(
    start: StartSpec, adapters: LoraSpec, model: nn.Module, seed: int, *, load: bool
) -> Begun:
    """Load the file that a job starts from, add adapters, and freeze parameters.

    A module whose parameters are all frozen by `start.freeze` stays in eval mode, also if `train()`
    is called: its running statistics keep the values of the file, and it computes the same for a
    sample in training as in validation.

    Args:
        start: of the job.
        adapters: of the job.
        model: on any device; changed in place. On the meta device it gets no values.
        seed: of the job.
        load: whether to load the file; not if a checkpoint has the values.

    Raises:
        SpecError: there is no such file, or it has adapters that the model has not; or a pattern
            matches nothing, or nothing is left to train.
        CheckpointError: the file is not sound, or does not fit the model.
    """
    path = start_file(start) if load else None
    loaded, empty = None, any(parameter.is_meta for parameter in model.parameters())
    if path is not None:
        _check_adapters(path, model)
        loaded = Loaded(fit_model(path, model, not start.partial))
        if not empty:
            loaded.fit.fill(model)
    adapted = lora.add(adapters, model, seed)
    if start.freeze:
        _freeze(start.freeze, model)
    return Begun(loaded, adapted, _rated(start.learning_rates, model), empty=empty)


def _check_adapters(path: Path, model: nn.Module) -> None:
    """Refuse the file of a run with LoRA: without its adapters it is the model before that run."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    left = [name for name in adapted_layers(path) if f"{name}.lora_A" not in own]
    if left:
        raise SpecError(
            f"{path} has LoRA adapters beside the model ({left[0]!r} has one). Add them to "
            "it first, with instep export RUN --merged --to FILE.safetensors, and start from that."
        )


def _freeze(patterns: Sequence[str], model: nn.Module) -> None:
    named = names_of(model)
    numbers = matched_by("start.freeze", patterns, list(named.values()))
    frozen = {parameter for number, parameter in enumerate(named) if number in numbers}
    if not any(parameter.requires_grad for parameter in named if parameter not in frozen):
        raise SpecError(
            f"start.freeze = {list(patterns)} leaves nothing to train: it matches "
            f"{len(frozen)} of the model's {len(named)} parameters. Leave some of them out."
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    for module in model.modules():
        own = set(module.parameters())
        if own and own <= frozen:
            lora.keep_in_eval_mode(module)


def _rated(rates: Mapping[str, float], model: nn.Module) -> tuple[str | None, ...]:
    if not rates:
        return ()
    named = names_of(model)
    trained = [names for parameter, names in named.items() if parameter.requires_grad]
    frozen = [names for parameter, names in named.items() if not parameter.requires_grad]
    chosen = rated_by(rates, trained, frozen)
    return (*([None] if None in chosen else []), *rates)


def groups(
    start: StartSpec,
    model: nn.Module,
    parameters: list[nn.Parameter],
    rated: Iterable[str | None],
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """The argument of the optimizer: the parameters, or groups of them with learning rates.

    Args:
        start: has the patterns.
        model: whose names they match; it may have lost parameters since `begin`.
        parameters: those to train, in the order of the model.
        rated: of what `begin` returned.

    Returns:
        `parameters`, if the job sets no rates. Otherwise a first group without `lr` for those
        that no pattern matches, if any; then one group for each pattern, in the order of the job.
    """
    rates = start.learning_rates
    if not rates:
        return parameters
    named = names_of(model)
    parts: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in rated}
    for parameter in parameters:
        parts[_deciding(rates, named[parameter])].append(parameter)
    return [
        {"params": part} if pattern is None else {"params": part, "lr": rates[pattern]}
        for pattern, part in parts.items()
    ]


def check_rates(given: Iterable[Mapping[str, Any]], model: nn.Module, optimizer: Optimizer) -> None:
    """Check that the optimizer uses the rates of `groups`, before a scheduler changes them.

    Raises:
        RecipeError: it has another rate for a parameter.
    """
    rates = {p: group.get("lr") for group in optimizer.param_groups for p in group["params"]}
    named = names_of(model)
    for group in given:
        if "lr" not in group:
            continue
        rate = float(group["lr"])
        for parameter in group["params"]:
            found = rates.get(parameter)
            if found is None or not math.isclose(float(found), rate, rel_tol=1e-6):
                raise RecipeError(
                    f"start.learning_rates gives {rate:g} to {named[parameter][0]!r}, but the "
                    f"optimizer has {found} for it. Recipe.optimizer "
                    "must use the groups that it is given: "
                    "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
                )


# ---- on names alone


def rated_by(
    patterns: Iterable[str], trained: Sequence[Names], frozen: Sequence[Names] = ()
) -> list[str | None]:
    """For each trained parameter the pattern that sets its rate; None if none matches.

    If several match, the one with the most letters wins, not counting wildcards. So their order
    does not matter.

    Raises:
        SpecError: a pattern matches none, or only frozen ones, or never wins; or two with
            equally many letters match a parameter.
    """
    patterns = list(patterns)
    for pattern in patterns:
        if not any(matches(pattern, names) for names in trained):
            if any(matches(pattern, names) for names in frozen):
                raise SpecError(
                    f"start.learning_rates has {pattern!r}, which matches frozen parameters only. "
                    "Leave it out, or freeze less."
                )
            raise matches_nothing("start.learning_rates", pattern, trained)
    chosen = [_deciding(patterns, names) for names in trained]
    for pattern in patterns:
        if pattern not in chosen:
            raise SpecError(
                f"start.learning_rates has {pattern!r}, which longer patterns overrule for every "
                "parameter that it matches. Leave it out."
            )
    return chosen


def _deciding(patterns: Iterable[str], names: Names) -> str | None:
    claims = sorted(
        (pattern for pattern in patterns if matches(pattern, names)), key=_letters, reverse=True
    )
    if len(claims) > 1 and _letters(claims[0]) == _letters(claims[1]):
        raise SpecError(
            f"start.learning_rates: {claims[0]!r} and {claims[1]!r} both match {names[0]!r}, with "
            "equally many letters. Make the one that should decide longer."
        )
    return claims[0] if claims else None


def _letters(pattern: str) -> int:
    """How many characters of a pattern are no wildcard."""
    return len(re.sub(r"\[!?\]?[^\]]*\]|[*?]", "", pattern))
