"""Makes the calls to a recipe's callbacks, on the worker that writes the ledger.

Calls follow a commit, in order, and the next step waits for them. What has been called is in a file
beside the ledger (`store/calls.py`), so that a successor makes what is missing, and the call that a
kill interrupted once more. Way in: `Callbacks.after_step`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from instep.data.batches import Batches
from instep.data.order import Position
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.state.committed import Commit
from instep.errors import RecipeError
from instep.recipe.callbacks import MOMENTS, CallbackContext, checked_value, methods
from instep.state.files.manifest import published
from instep.store.calls import NAME, Calls, Due

LONG_S = 10.0
"""A call that takes longer is told."""

_CHANGE = 0.005
"""A learning rate is logged when it has changed by this share of the largest one so far."""


During = Callable[[str], AbstractContextManager[None]]
Planned = Iterator[tuple[int, str, tuple[Any, ...]]]
"""Calls of a step: number of the callback, method, and what it gets beside the context."""


class Callbacks:
    """The callbacks of a recipe on one worker, and the learning rates that the run logs itself.

    Args:
        member: this worker's membership in the run.
        engine: has the commits.
        callbacks: of the recipe.
        batches: what each commit takes.
    """

    def __init__(
        self, member: Member, engine: Engine, callbacks: Sequence[Any], batches: Batches
    ) -> None:
        self._member, self._engine, self._batches = member, engine, batches
        self._callbacks = [(each, methods(each)) for each in callbacks]
        self.gather: Callable[[], None] = lambda: None
        """Called before each call, which may read the model."""
        self._during: During = lambda call: nullcontext()
        self._steps: Calls | None = None
        self._saves: Calls | None = None
        self._logged: dict[str, float] = {}
        self._last: CallbackContext | None = None
        self._next_rates: tuple[float, ...] = ()
        self._logged_rates: tuple[float, ...] = ()
        self._largest = 0.0
        self.present = ""
        """The call that is being made, or has raised."""
        self._since = 0.0
        self._told_long = set[str]()

    def watch(self, during: During) -> None:
        """Enter a context around each call, which is given its name."""
        self._during = during

    def form(self, *, anew: bool) -> None:
        """A generation begins; `anew`: from a checkpoint, or from the run's beginning."""
        self._steps = self._saves = None
        self._next_rates, self.present = self._rates(), ""
        if not self._callbacks or self._engine.comm.rank != 0:
            return
        path, progress = self._member.run / NAME, self._engine.state.progress
        self._steps = Calls(path, "step", self._writes)
        self._saves = Calls(path, "save", self._writes)
        self._logged = dict(self._steps.logged)
        if anew:
            if not self._steps.known or self._saves.complete(progress.course, progress.step):
                self._saves.continue_after(progress.course, progress.step)
            self._steps.continue_after(progress.course, progress.step)

    def _writes(self, write: Callable[[], None]) -> bool:
        self._member.lease.check()
        return self._engine.records.ledger.while_held(write)

    def behind(self) -> bool:
        """Whether calls of the last commit are missing, as the worker that was to make them is
        lost; every member calls it.

        Raises:
            PeerError: a member went away meanwhile.
        """
        if not self._callbacks:
            return False
        progress, comm = self._engine.state.progress, self._engine.comm
        behind = False
        if self._steps is not None and progress.step:
            behind = not self._steps.complete(progress.course, progress.step)
        told = torch.tensor([float(behind)], device=self._engine.device)
        comm.broadcast(told)
        return bool(told.item())

    # ---- after a step

    def after_step(
        self,
        done: Commit,
        where: Position,
        metrics: Mapping[str, float] | None,
        losses: Mapping[str, float],
    ) -> None:
        """Make the calls of a commit, but those that have been made."""
        self._log_rates(done)
        if self._steps is None:
            return
        rates = self._rates()
        self._last = CallbackContext(
            run=self._member.run,
            step=done.step,
            epoch=where.epoch,
            samples=self._batches.taken(done.step),
            loss=done.loss,
            losses=dict(losses),
            metrics=metrics,
            lr=rates[0],
            lrs=rates,
            gradient_norm=done.norm,
            model=self._engine.model,
            repeated=False,
            log=self._log,
        )
        self._make(self._steps, done.step, self._of_step(metrics))
        self._logged = {}

    def after_save(self) -> None:
        """A checkpoint may be complete: make the calls for it."""
        if self._saves is None or self._last is None:
            return
        course = self._engine.state.progress.course
        for step, path in sorted(published(self._member.run / "checkpoints")):
            if not self._saves.complete(course, step):
                self._make(self._saves, step, self._having("on_save", path))

    def _of_step(self, metrics: Mapping[str, float] | None) -> Planned:
        yield from self._having("on_step_end")
        if metrics is not None:
            yield from self._having("on_evaluate", dict(metrics))
        if self._logged:
            yield from self._having("on_log", dict(self._logged))
            assert self._last is not None
            self._tell(self._last.step, self._logged)

    def _having(self, moment: str, *more: Any) -> Planned:
        for number, (_, own) in enumerate(self._callbacks):
            if moment in own:
                yield number, moment, more

    def _make(self, calls: Calls, step: int, due: Planned) -> None:
        assert self._last is not None
        course, count = self._engine.state.progress.course, len(self._callbacks)
        for number, moment, more in due:
            self.gather()
            place = MOMENTS.index(moment) * count + number
            what = calls.begin(course, step, place, self._logged)
            if what is not Due.DONE:
                callback = self._callbacks[number][0]
                self._since = time.monotonic()
                self.present = f"{type(callback).__name__}.{moment}"
                context = replace(self._last, repeated=what is Due.AGAIN)
                with self._guarded(), self._during(self.present), torch.no_grad():
                    getattr(callback, moment)(context, *more)
                self.present = ""
        calls.end(course, step)

    def tell_if_long(self) -> None:
        """In the thread of heartbeats: say once of a method that the others wait for it."""
        call, took_s = self.present, time.monotonic() - self._since
        if call and took_s > LONG_S and call not in self._told_long:
            self._told_long.add(call)
            where = f"worker {self._member.number} at step {self._engine.state.progress.step}"
            text = f"{call} has not returned for {took_s:.0f} s, on {where}; the run waits for it."
            self._member.warn(text)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """The call changes nothing of the model, which the other workers have as it is."""
        model = self._engine.model
        modes, before = [each.training for each in model.modules()], self._versions()
        trained = {name: each.requires_grad for name, each in model.named_parameters()}
        with self._uncalled() if self._member.job.mesh.ranks > 1 else nullcontext():
            yield
        for each, mode in zip(model.modules(), modes, strict=True):
            each.training = mode
        for name, parameter in model.named_parameters():
            if trained.get(name, parameter.requires_grad) != parameter.requires_grad:
                raise RecipeError(
                    f"{self.present} has changed whether {name!r} needs a gradient. Callbacks are "
                    "called on one worker, and the others would go on without the change: freeze "
                    "it in the recipe, or with start.freeze."
                )
        for name, version in self._versions().items():
            if before.get(name, version) != version:
                raise RecipeError(
                    f"{self.present} has changed {name!r} of the model. Callbacks are called on "
                    "one worker, and the others would go on without the change: copy what you "
                    "change, and call the model in eval mode."
                )

    @contextmanager
    def _uncalled(self) -> Iterator[None]:
        """The model is a part, and a call of it would wait for the other processes' for ever."""
        own = set(self._engine.model.modules())

        def refuse(module: nn.Module, _: Any) -> None:
            if module in own:
                raise RecipeError(
                    f"{self.present} has called the model, of which each process of a mesh has a "
                    "part, and callbacks are called on one process. Measure it in Recipe.metrics."
                )

        hook = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            hook.remove()

    def _versions(self) -> dict[str, int]:
        """How often each tensor of the model was written to; of a mesh, reading does that too."""
        model = self._engine.model
        if self._member.job.mesh.ranks > 1:
            return {}
        every = itertools.chain(model.named_parameters(), model.named_buffers())
        return {name: tensor._version for name, tensor in every}

    # ---- what is logged

    def _log(self, name: str, value: float) -> None:
        number = checked_value(name, value)
        if self.present.endswith((".on_log", ".on_save")):
            raise RecipeError(
                f"log({name!r}, ...) was called in {self.present}: the values of this step have "
                "been handed out. Call it in on_step_end or on_evaluate."
            )
        self._logged[name] = number

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._member.emit("logged", step=step, values=finite)

    def _rates(self) -> tuple[float, ...]:
        optimizers = [turn.update.optimizer for turn in self._engine.turns]
        return tuple(float(group["lr"]) for each in optimizers for group in each.param_groups)

    def _log_rates(self, done: Commit) -> None:
        """Log the rates that the step used, where they have changed enough for a curve."""
        rates, self._next_rates = self._next_rates, self._rates()
        if self._engine.comm.rank != 0:
            return
        self._largest = max(self._largest, *map(abs, rates))
        known = len(self._logged_rates) == len(rates)
        steps = zip(rates, self._logged_rates, strict=False)
        changed = max((abs(new - old) for new, old in steps), default=0.0)
        if not known or changed > _CHANGE * self._largest or (done.ends and changed):
            self._logged_rates = rates
            names = ["train/learning_rate"]
            names += [f"train/learning_rate/{n}" for n in range(1, len(rates))]
            same = len({*rates}) == 1
            self._tell(done.step, dict(zip(names[: 1 if same else None], rates, strict=False)))
