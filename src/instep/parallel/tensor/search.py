"""Finding a tensor plan: pairs of layers first, single layers then, each judged by a trial.

Outputs of one layer that only some others read (`flow.py`) are a pair's cut activations: the first
is cut by columns, the others by rows, which costs one sum instead of gathering each output. Heads
of an attention follow from it: its number of heads is divided if the trial passes only so. Layers
of the same kind are tried together. What is left over is cut alone, with its output gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import nn

from instep.errors import RecipeError, SpecError
from instep.parallel.tensor.alone import PlanDiffers
from instep.parallel.tensor.flow import END, Flow, container, observe
from instep.parallel.tensor.layers import cut_dims, kind_of, widths
from instep.parallel.tensor.plan import Cut, Plan, Style, numberless, styles_of
from instep.parallel.tensor.sequence import split_sequence
from instep.parallel.tensor.trial import ComputeLoss, PlanTrial

SMALL = 8
"""A layer alone with less than the largest's weights over this stays whole."""

MOST_ATTRIBUTES = 5
"""Attributes of a module that are tried for a number of heads."""

Group = dict[str, Style]
"""Layers that are cut together."""


def find_plan(
    model: nn.Module,
    compute_loss: ComputeLoss,
    batch: Any,
    ranks: int,
    *,
    table: Mapping[str, str] | None = None,
    sequence: bool = False,
    whole: Collection[str] = (),
) -> Plan:
    """How a model is cut over `ranks`; the same on every process that has the same model and batch.

    Every cut has passed a trial: loss (in training and eval mode) and all gradients are those of
    the whole model. The model is not changed, but a copy of it is made.

    Args:
        model: whole, with its parameters.
        compute_loss: from a model and a batch to the loss, a scalar.
        batch: an example of what is trained on; small is enough.
        ranks: processes that share each product.
        table: the user's own plan: patterns of module names to a style of `plan.Style`, or
            `replicate`. Numbers of heads are still divided where it is needed.
        sequence: split activations between blocks along the sequence (`sequence.py`).
        whole: modules that are called with whole tensors, as where a pipeline stage begins.

    Raises:
        SpecError: the table has an unknown style, a pattern that matches nothing, or a style for a
            layer that cannot be cut so.
        RecipeError: the model cut by the table computes something else; or the sequence is to be
            split, and no list of blocks allows it.
    """
    search = _Search(PlanTrial(model, compute_loss, batch, ranks, whole))
    plan = search.plan(table)
    return split_sequence(plan, search.trial, search.layers, search.flow) if sequence else plan


class _Search:
    def __init__(self, trial: PlanTrial) -> None:
        self.trial, self.ranks, self.model = trial, trial.ranks, trial.model
        self.layers = {name: each for name, each in self.model.named_modules() if kind_of(each)}
        self.flow: Flow = observe(self.layers, self.trial.run)
        self.kept: dict[str, str] = {}
        sizes = [module.get_parameter("weight").numel() for module in self.layers.values()]
        self.small = max(sizes, default=0) // SMALL
        self.tied: dict[int, list[str]] = {}
        for name, module in self.layers.items():
            self.tied.setdefault(id(module.get_parameter("weight")), []).append(name)

    def plan(self, table: Mapping[str, str] | None) -> Plan:
        plan = Plan(self.ranks)
        if table is not None:
            plan = self._of_table(table)
        else:
            for kind in self._pairs():
                plan = self._with(plan, kind) or plan
            singles = self._singles()
            together = self._with(plan, [group for kind in singles for group in kind])
            for kind in [] if together else singles:
                plan = self._with(plan, kind) or plan
            plan = together or plan
        return replace(plan, kept=self._reasons(plan))

    def _of_table(self, table: Mapping[str, str]) -> Plan:
        styles = styles_of(table, list(self.layers))
        for name, style in styles.items():
            why = self._hinders(name, style) or self._unseen(name)
            if why:
                raise SpecError(f"mesh.plan: {name} = {style!r}: {why}. Leave the layer out.")
        self._check_ties(styles)
        kinds: dict[Any, list[Group]] = {}
        for writers, readers in self.flow.groups():
            group: Group = {
                name: styles[name] for name in sorted(writers) if styles.get(name) == "column"
            }
            group |= {name: "row" for name in sorted(readers) if styles.get(name) == "row"}
            if group:
                kinds.setdefault(self._kind(group), []).append(group)
        alone: Group = {
            name: style for name, style in styles.items() if style not in ("column", "row")
        }
        plan = Plan(self.ranks)
        for kind in [*kinds.values(), *([[alone]] if alone else [])]:
            with_kind = self._with(plan, kind)
            if with_kind is None:
                name = next(iter(kind[0]))
                raise RecipeError(
                    f"mesh.plan: with {name} and the layers beside it {self.kept[name]}. Every "
                    "'column' must be read by a 'row' only, with nothing between them that mixes "
                    "columns; else make it 'column_gather', or leave it out."
                )
            plan = with_kind
        for name, style in styles.items():
            if name not in plan.cuts:
                why = "it reads the output of no" if style == "row" else "its output is read by no"
                raise SpecError(
                    f"mesh.plan: {name} = {style!r}: {why} other layer. Make it 'column_gather', "
                    "or leave it out."
                )
        return plan

    def _check_ties(self, styles: Mapping[str, Style]) -> None:
        for name, style in styles.items():
            for other in self._others(name):
                if self._dim(other, styles.get(other)) != self._dim(name, style):
                    raise SpecError(
                        f"mesh.plan: {name} = {style!r} and {other} = "
                        f"{styles.get(other, 'replicate')!r}, but they share one weight. Cut both "
                        "along the same dimension, as 'vocabulary' of an embedding and "
                        "'column_gather' of the output layer are, or neither."
                    )

    def _dim(self, name: str, style: Style | None) -> int | None:
        kind = kind_of(self.layers[name])
        return cut_dims(kind, Cut(style, name))["weight"] if style else None

    def _pairs(self) -> Iterator[list[Group]]:
        """Groups of a writer's and a reader's side, by kind, the smallest first."""
        kinds: dict[Any, list[Group]] = {}
        for writers, readers in self.flow.groups():
            group: Group = {**dict.fromkeys(sorted(writers), "column")}
            group |= dict.fromkeys(sorted(readers), "row")
            if END in readers or writers & readers or sum(map(self._size, group)) <= self.small:
                continue
            if not any(
                self._hinders(name, style) or self._others(name) for name, style in group.items()
            ):
                kinds.setdefault(self._kind(group), []).append(group)
        yield from kinds.values()

    def _singles(self) -> list[list[Group]]:
        """Layers that are cut alone, or with those that share their weight, by kind."""
        kinds: dict[Any, list[Group]] = {}
        for name in self.layers:
            names = [name, *self._others(name)]
            if name != self._first(name) or self._size(name) <= self.small:
                continue
            embeds = {kind_of(self.layers[each]) == "embedding" for each in names}
            group: Group = {
                each: "vocabulary"
                if len(embeds) > 1 and kind_of(self.layers[each]) == "embedding"
                else "column_gather"
                for each in names
            }
            called = set(names) & set(self.flow.called)
            if called and not any(self._hinders(each, style) for each, style in group.items()):
                kinds.setdefault(self._kind(group), []).append(group)
        return list(kinds.values())

    def _with(self, plan: Plan, kind: list[Group]) -> Plan | None:
        """The plan with the groups of one kind too, or None if no trial passes."""
        cuts, taken = dict(plan.cuts), []
        for group in kind:
            if not any(name in cuts for name in group):
                paired = "row" in group.values()
                where = container(set(group), self.trial.called) if paired else ""
                first = next(iter(group))
                label = f"{where}:{first}" if paired else ""
                cuts |= {name: Cut(style, label or name) for name, style in group.items()}
                taken.append(group)
        if not taken:
            return plan
        failure: PlanDiffers | None = None
        for edits in self._edits(taken):
            tried = replace(plan, cuts=cuts)
            tried = replace(tried, edits={**plan.edits, **self._slow_paths(tried), **edits})
            try:
                found = self.trial.check(tried)
            except PlanDiffers as failed:
                failure = failure or failed
                continue
            return replace(tried, summed=found.summed, draws=found.draws)
        for group in taken:
            for name in group:
                self.kept.setdefault(name, f"cut, {failure}")
        return None

    def _edits(self, groups: list[Group]) -> Iterator[dict[str, dict[str, Any]]]:
        """Attributes to divide by the number of ranks: none, each, each two, and so on."""
        yield {}
        if "row" not in groups[0].values():
            return
        found = {
            (module, key): value
            for group in groups
            for module in self._around(group)
            for key, value in self._divisible(module, group)
        }
        keys = sorted({key for _, key in found})[:MOST_ATTRIBUTES]
        for count in range(1, len(keys) + 1):
            for chosen in combinations(keys, count):
                edits: dict[str, dict[str, Any]] = {}
                for (module, key), value in found.items():
                    if key in chosen:
                        edits.setdefault(module, {})[key] = value // self.ranks
                yield edits

    def _divisible(self, module: str, group: Group) -> Iterator[tuple[str, int]]:
        cut = {widths(self.layers[name])[1] for name in group if group[name] == "column"}
        for key, value in vars(self.model.get_submodule(module)).items():
            if type(value) is not int or value < 2 or value % self.ranks:
                continue
            if any(not width % value for width in cut):
                yield key, value

    def _around(self, group: Group) -> list[str]:
        """Modules whose attributes may say how a group's activations are shaped."""
        parents = {name.rpartition(".")[0] for name in group}
        inside = {
            name
            for name, module in self.model.named_modules()
            if name.rpartition(".")[0] in parents and next(module.parameters(), None) is None
        }
        return sorted(parents | inside | {container(set(group), self.trial.called)})

    def _slow_paths(self, plan: Plan) -> dict[str, dict[str, Any]]:
        """torch's encoder has a fast path in eval mode that reads weights without their layers."""
        edits: dict[str, dict[str, Any]] = {}
        for name, module in self.model.named_modules():
            if not any(layer.startswith(f"{name}.") for layer in plan.cuts):
                continue
            if isinstance(module, nn.TransformerEncoderLayer):
                edits[name] = {"activation_relu_or_gelu": 0}
            elif isinstance(module, nn.TransformerEncoder):
                edits[name] = {"use_nested_tensor": False}
        return edits

    def _hinders(self, name: str, style: Style) -> str:
        """Why a layer cannot be cut so; empty if nothing is known."""
        module: Any = self.layers[name]
        inputs, outputs = widths(module)
        if name in self.flow.raw:
            return "its weight is read without a call of the layer"
        if kind_of(module) == "embedding":
            if module.sparse or module.max_norm is not None:
                return "sparse gradients and max_norm need the whole embedding"
            if style == "row" or (style == "vocabulary" and module.scale_grad_by_freq):
                return f"an embedding like this cannot be cut by {style}"
        elif style == "vocabulary":
            return "only an embedding has a vocabulary"
        width = inputs if style in ("row", "vocabulary") else outputs
        if width % self.ranks and (not self._others(name) or width < self.ranks):
            word = "inputs" if style in ("row", "vocabulary") else "outputs"
            return f"its {width} {word} cannot be divided by {self.ranks}"
        return ""

    def _unseen(self, name: str) -> str:
        """Why no trial can judge how a layer is cut; empty if one can."""
        called = {name, *self._others(name)} & set(self.flow.called)
        return "" if called else "it is not called in the example"

    def _others(self, name: str) -> list[str]:
        return [each for each in self.tied[id(self.layers[name].weight)] if each != name]

    def _first(self, name: str) -> str:
        return self.tied[id(self.layers[name].weight)][0]

    def _size(self, name: str) -> int:
        return int(self.layers[name].get_parameter("weight").numel())

    def _kind(self, group: Group) -> Any:
        return tuple(
            (numberless(name), style, widths(self.layers[name])) for name, style in group.items()
        )

    def _reasons(self, plan: Plan) -> dict[str, str]:
        """Why each module with parameters of its own stays whole."""
        reasons = {}
        for name, module in self.model.named_modules():
            if name in plan.cuts or not any(
                each is not None for each in module._parameters.values()
            ):
                continue
            if name not in self.layers:
                reasons[name] = f"{type(module).__name__} is not a layer that can be cut"
            elif name not in self.flow.called:
                reasons[name] = self._hinders(name, "column") or "it is not called in the example"
            elif self._size(name) <= self.small:
                reasons[name] = "too small to be worth an exchange"
            else:
                reasons[name] = self._hinders(name, "column") or self.kept.get(name, "left so")
        return reasons
