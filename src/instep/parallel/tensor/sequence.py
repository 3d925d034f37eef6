"""Where the sequence can be split between the blocks of a model that is cut already.

Between layers that are cut, each rank computes the same residuals, norms and dropouts. Split along
the sequence, each computes its part of them: a row layer's sum leaves each rank its part, and a
gather comes before the next column layers (Korthikanti et al. 2022, arXiv:2205.05198).

Each list of blocks is a stretch. What in its blocks needs the whole sequence, as an attention does,
shows when a module runs on a part (`calls.py`): it gets what is gathered. The sequence is split
where the stretch begins, at the embeddings if it can be, and gathered where it ends. A trial judges
all that, as it judges each cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from torch import Tensor, nn

from instep.errors import RecipeError
from instep.parallel.blocks import repeated_blocks
from instep.parallel.nested import tensors_in
from instep.parallel.tensor import calls
from instep.parallel.tensor.alone import PlanDiffers
from instep.parallel.tensor.calls import Call, Cuts
from instep.parallel.tensor.flow import Flow
from instep.parallel.tensor.links import Links
from instep.parallel.tensor.plan import Change, Crossing, Plan
from instep.parallel.tensor.trial import PlanTrial

Borders = dict[str, tuple[Crossing, ...]]


class _Unsplit(Exception):
    """A stretch cannot be split; the text says why."""


def split_sequence(
    plan: Plan, trial: PlanTrial, layers: Mapping[str, nn.Module], flow: Flow
) -> Plan:
    """The plan with the sequence split in each list of blocks that allows it.

    Args:
        plan: how layers are cut.
        trial: judges.
        layers: those that could be cut, by name.
        flow: of the model.

    Raises:
        RecipeError: no list of blocks allows it.
    """
    return _SequenceSplit(plan, trial, layers, flow).plan()


@dataclass
class _Stretch:
    """A list of blocks, each called once in a pass."""

    name: str
    blocks: list[Call] = field(default_factory=list)
    number: int = 0
    """Of the residual among the inputs of a block."""
    made: int = 0
    """Of the residual among its outputs."""
    dim: int = -2
    last: bool = False
    """Whether no other stretch comes after it."""

    @property
    def length(self) -> int:
        """Of the sequence in the example."""
        return int(self.residual.shape[self.dim])

    @property
    def residual(self) -> Tensor:
        """What the first block gets."""
        return tensors_in(self.blocks[0].inputs)[self.number]


@dataclass
class _Inside:
    """What needs the whole sequence within the blocks of a stretch."""

    layers: dict[str, Cuts] = field(default_factory=dict)
    """Layers that are cut; and which of their inputs would be a part."""
    mixers: dict[str, tuple[Call, Cuts]] = field(default_factory=dict)
    """Modules that give something else for a part of their inputs."""


class _SequenceSplit:
    def __init__(
        self, plan: Plan, trial: PlanTrial, layers: Mapping[str, nn.Module], flow: Flow
    ) -> None:
        self.start, self.trial, self.flow = plan, trial, flow
        self.layers = layers
        self.calls = list(calls.record(trial.model, trial.run).walk())
        self.places = {call.name: at for at, call in reversed(list(enumerate(self.calls)))}
        self.parts = [Links(rank, plan.ranks).share for rank in (0, plan.ranks - 1)]

    def plan(self) -> Plan:
        plan, reasons = self.start, {}
        stretches = self._stretches()
        for stretch in stretches:
            try:
                plan = self._with(plan, stretch)
            except _Unsplit as why:
                reasons[stretch.name] = str(why)
        if not plan.sequence:
            told = "; ".join(f"in {name}, {why}" for name, why in reasons.items())
            raise RecipeError(
                "mesh.sequence = true, but the sequence cannot be split between the blocks of this "
                f"model: {told or 'it has no list of repeated blocks with layers that are cut'}. "
                "Set it to false."
            )
        return replace(plan, unsplit=reasons)

    def _stretches(self) -> list[_Stretch]:
        """Lists of blocks that have layers that are cut, in the order of their calls."""
        found: dict[str, _Stretch] = {}
        for name in repeated_blocks(self.trial.model):
            if any(cut.startswith(f"{name}.") for cut in self.start.cuts):
                of = name.rpartition(".")[0]
                stretch = found.setdefault(of, _Stretch(of))
                stretch.blocks += [call for call in self.calls if call.name == name]
        ordered = sorted(
            (each for each in found.values() if each.blocks),
            key=lambda each: self.places[each.blocks[0].name],
        )
        for stretch in ordered:
            stretch.blocks.sort(key=lambda call: self.places[call.name])
            stretch.last = stretch is ordered[-1]
        return ordered

    def _with(self, plan: Plan, stretch: _Stretch) -> Plan:
        """The plan with one more stretch split."""
        self._follow(stretch)
        failure: PlanDiffers | None = None
        for borders in self._candidates(stretch):
            if any(name in plan.sequence for name in borders):
                continue
            try:
                tried = replace(plan, sequence={**plan.sequence, **borders})
                found = self.trial.check(tried)
            except PlanDiffers as failed:
                failure = failed
                continue
            return replace(tried, summed=found.summed, draws=found.draws)
        raise _Unsplit(str(failure or f"{stretch.blocks[0].name} shares layers with others"))

    def _follow(self, stretch: _Stretch) -> None:
        """Find the tensor that goes from block to block, and its sequence."""
        first = stretch.blocks[0]
        if len({call.name for call in stretch.blocks}) < len(stretch.blocks):
            raise _Unsplit(f"{first.name} is called more than once")
        made = tensors_in(first.made)
        pairs = [
            (not learned, at, to)
            for at, (tensor, learned) in enumerate(
                zip(tensors_in(first.inputs), first.learned, strict=True)
            )
            for to, other in enumerate(made)
            if tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape == other.shape
        ]
        if not pairs:
            raise _Unsplit(f"{first.name} gives no tensor of the shape of one that it gets")
        _, stretch.number, stretch.made = min(pairs)
        whole = stretch.residual
        for call in stretch.blocks:
            shapes = [each.shape for each in tensors_in(call.made)[stretch.made : stretch.made + 1]]
            if shapes != [whole.shape]:
                raise _Unsplit(f"{call.name} gives no tensor of the shape that {first.name} gets")
        mixed = calls.mixed_dims(first, stretch.number, stretch.made)
        if not mixed and whole.dim() < 3:
            raise _Unsplit(
                f"{first.name} gets samples and features (shape {list(whole.shape)}), no sequence"
            )
        stretch.dim = mixed[0] if mixed else -2
        if stretch.length < self.start.ranks:
            raise _Unsplit(
                f"the example's sequence of {stretch.length} is shorter than the number of ranks"
            )

    def _inside(self, stretch: _Stretch, early: bool) -> _Inside:
        """What needs the whole sequence within the blocks.

        Args:
            early: a module that calls column layers itself gets the whole sequence, and not only
                those layers: it may look at the shape of its input.
        """
        inside = _Inside()
        for block in stretch.blocks:
            if block.name in self.layers:
                raise _Unsplit(f"{block.name} is a single layer")
            self._look_within(block, {stretch.number: stretch.dim}, inside, early)
            if block.name in inside.mixers:
                raise _Unsplit(f"{block.name} itself computes across positions")
        if not inside.layers and not any(self._cut_in(name) for name in inside.mixers):
            raise _Unsplit("no layer that is cut reads what its blocks pass on")
        return inside

    def _look(self, call: Call, cuts: Cuts, inside: _Inside, early: bool) -> None:
        """Find what needs the whole sequence in a call of which some inputs are cut."""
        if call.name in self.start.cuts:
            inside.layers[call.name] = cuts
        elif not self._cut_in(call.name) and all(calls.alone(call, cuts, p) for p in self.parts):
            return
        elif early and any(self._style(each.name) == "column" for each in call.within):
            inside.mixers[call.name] = call, cuts
        else:
            self._look_within(call, cuts, inside, early)

    def _look_within(self, call: Call, cuts: Cuts, inside: _Inside, early: bool) -> None:
        found = [calls.glue(call, cuts, part) for part in self.parts] if call.within else [None]
        if None in found:
            inside.mixers[call.name] = call, cuts
            return
        for inner, inner_cuts in found[0] or []:
            if inner_cuts:
                self._look(inner, inner_cuts, inside, early)

    def _style(self, name: str) -> str:
        return self.start.cuts[name].style if name in self.start.cuts else ""

    def _cut_in(self, name: str) -> list[str]:
        return [each for each in self.start.cuts if each.startswith(f"{name}.")]

    def _candidates(self, stretch: _Stretch) -> Iterator[Borders]:
        """What to try, what sends least first."""
        beginnings = [self._sources(stretch), self._first_block(stretch)]
        ends = [self._readers(stretch), self._last_block(stretch)]
        for summed, early, end, beginning in product(
            (True, False), (False, True), ends, beginnings
        ):
            within = self._within(stretch, self._inside(stretch, early), summed)
            if beginning and end and not _overlap(beginning, within, end):
                yield {**beginning, **within, **end}

    def _within(self, stretch: _Stretch, inside: _Inside, summed: bool) -> Borders:
        """Crossings in blocks.

        Args:
            summed: gradients of what is gathered are summed, and rows in modules that need the
                whole sequence leave each rank its part.
        """
        borders: Borders = {}
        for name, cuts in inside.layers.items():
            style, dim = self.start.cuts[name].style, next(iter(cuts.values()))
            ins = [Crossing("input", at, "gather_sum", d, stretch.name) for at, d in cuts.items()]
            if style in ("row", "vocabulary"):
                borders[name] = (Crossing("output", 0, "sum_split", dim, stretch.name),)
            elif style == "column_gather":
                borders[name] = (*ins, Crossing("output", 0, "split", dim, stretch.name))
            else:
                borders[name] = tuple(ins)
        for name, (call, cuts) in inside.mixers.items():
            cut = self._cut_in(name)
            change: Change = "gather_sum" if cut and summed else "gather"
            crossings = [Crossing("input", at, change, d, stretch.name) for at, d in cuts.items()]
            outputs = calls.outputs_of(call, cuts)
            rows = [each for each in cut if self._style(each) == "row"]
            if rows and summed:
                dim = next(iter(cuts.values()))
                for row in rows:
                    borders[row] = (Crossing("output", 0, "sum_split", dim, stretch.name),)
            elif rows or not any(self._style(each) == "column" for each in cut):
                crossings += [
                    Crossing("output", at, "split", d, stretch.name) for at, d in outputs.items()
                ]
            borders[name] = tuple(crossings)
        return borders

    def _sources(self, stretch: _Stretch) -> Borders:
        """Split what embeddings give before the first block."""
        stop, width = self.places[stretch.blocks[0].name], stretch.residual.shape[-1]
        borders: Borders = {}
        for call in self.calls[:stop]:
            made = tensors_in(call.made)
            if call.within or any(call.learned) or len(made) != 1 or call.name == "":
                continue
            if next(call.module.parameters(), None) is None or made[0].dim() < -stretch.dim:
                continue
            if (made[0].shape[stretch.dim], made[0].shape[-1]) == (stretch.length, width):
                cut = self.start.cuts.get(call.name)
                change: Change = "sum_split" if cut and cut.style == "vocabulary" else "split"
                borders[call.name] = (Crossing("output", 0, change, stretch.dim, stretch.name),)
        return borders

    def _first_block(self, stretch: _Stretch) -> Borders:
        at = Crossing("input", stretch.number, "split", stretch.dim, stretch.name)
        return {stretch.blocks[0].name: (at,)}

    def _readers(self, stretch: _Stretch) -> Borders:
        """Gather what layers after the last block read from it."""
        blocks = {call.name for call in stretch.blocks}
        inner = {name for name in self.layers if any(name.startswith(f"{b}.") for b in blocks)}
        borders: Borders = {}
        if not stretch.last:
            return borders
        for name, sources in self.flow.sources.items():
            if name in self.layers and name not in inner and sources & inner:
                cut = self.start.cuts.get(name)
                change: Change = "gather_sum" if cut else "gather"
                borders[name] = (Crossing("input", 0, change, stretch.dim, stretch.name),)
        return borders

    def _last_block(self, stretch: _Stretch) -> Borders:
        at = Crossing("output", stretch.made, "gather", stretch.dim, stretch.name)
        return {stretch.blocks[-1].name: (at,)}


def _overlap(*borders: Borders) -> bool:
    names = [name for each in borders for name in each]
    return len(names) > len(set(names))
