"""Which layers' outputs become which layers' inputs, seen in one pass of the model.

The autograd graph of the loss says it: from a layer's input it is followed back to the outputs of
other layers. How layers are cut is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from instep.parallel.nested import tensors_in

END = ""
"""Stands for the loss among the readers."""


@dataclass
class Flow:
    """What one pass showed."""

    sources: dict[str, set[str]] = field(default_factory=dict)
    """For each layer, and `END`: the layers whose outputs it reads, in any way."""
    called: list[str] = field(default_factory=list)
    """Layers, in the order of their first call."""
    raw: set[str] = field(default_factory=set)
    """Layers whose parameters were used outside of their own call."""

    def groups(self) -> Iterator[tuple[set[str], set[str]]]:
        """Writers and readers that belong together: no writer is read by others, nor a reader
        reads others. Smallest first."""
        parent: dict[tuple[str, str], tuple[str, str]] = {}

        def root(of: tuple[str, str]) -> tuple[str, str]:
            while parent.setdefault(of, of) != of:
                of = parent[of]
            return of

        for reader, writers in self.sources.items():
            for writer in sorted(writers):
                parent[root(("writes", writer))] = root(("reads", reader))
        members: dict[Any, tuple[set[str], set[str]]] = {}
        for kind, name in parent:
            found = members.setdefault(root((kind, name)), (set(), set()))
            found[kind == "reads"].add(name)
        place = {name: index for index, name in enumerate(self.called)}

        def early(group: tuple[set[str], set[str]]) -> tuple[int, int]:
            return len(group[0] | group[1]), min(place[name] for name in group[0])

        yield from sorted(members.values(), key=early)


def observe(layers: Mapping[str, nn.Module], run: Callable[[], Tensor]) -> Flow:
    """Run the model once and follow the graph of its loss.

    Args:
        layers: by name; their parameters need gradients.
        run: computes the loss.
    """
    flow = Flow()
    outputs: dict[Any, str] = {}
    inputs: dict[str, list[Any]] = {}
    running: list[str] = []
    handles = []

    def before(name: str, args: Any) -> None:
        running.append(name)
        inputs.setdefault(name, []).extend(
            each.grad_fn for each in tensors_in(args) if each.grad_fn is not None
        )

    def after(name: str, made: Any) -> None:
        running.pop()
        if name not in flow.called:
            flow.called.append(name)
        outputs.update((each.grad_fn, name) for each in tensors_in(made) if each.grad_fn)

    for name, module in layers.items():
        handles.append(module.register_forward_pre_hook(lambda _, args, n=name: before(n, args)))
        handles.append(module.register_forward_hook(lambda _, args, made, n=name: after(n, made)))
    try:
        with _Watch(layers, running, flow.raw):
            loss = run()
    finally:
        for handle in handles:
            handle.remove()
    inputs[END] = [loss.grad_fn]
    for name, starts in inputs.items():
        flow.sources[name] = _sources(starts, outputs)
    return flow


def _sources(starts: list[Any], outputs: Mapping[Any, str]) -> set[str]:
    found, seen, left = set(), set(), list(starts)
    while left:
        node = left.pop()
        if node in outputs:
            found.add(outputs[node])
        elif node not in seen:
            seen.add(node)
            left.extend(each for each, _ in node.next_functions if each is not None)
    return found


_HARMLESS = {"shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_meta", "is_cuda"}


class _Watch(TorchFunctionMode):
    """Notes layers whose parameters are used while another layer, or none, is running."""

    def __init__(self, layers: Mapping[str, nn.Module], running: list[str], raw: set[str]) -> None:
        super().__init__()
        self._running, self._raw = running, raw
        self._owners: dict[int, set[str]] = {}
        for name, module in layers.items():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), set()).add(name)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at what is used, and compute."""
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute not in _HARMLESS:
            for each in tensors_in([args, kwargs or {}]):
                owners = self._owners.get(id(each), set())
                if owners and not (self._running and self._running[-1] in owners):
                    self._raw |= owners
        return func(*args, **(kwargs or {}))


def container(names: set[str], ran: set[str]) -> str:
    """The smallest module that has all of these modules in it and is itself called."""
    paths = [name.split(".")[:-1] for name in names]
    common = paths[0]
    for path in paths[1:]:
        while common != path[: len(common)]:
            common = common[:-1]
    while common and ".".join(common) not in ran:
        common = common[:-1]
    return ".".join(common)


def called_modules(model: nn.Module, run: Callable[[], Tensor]) -> set[str]:
    """Names of all modules that are called in one pass."""
    ran: set[str] = set()
    handles = [
        module.register_forward_pre_hook(lambda *_, n=name: ran.add(n))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    try:
        run()  # with gradients: the loss may take derivatives by the inputs
    finally:
        for handle in handles:
            handle.remove()
    return ran
