"""A pass of the present step once more, for an observer that looks at it."""

from __future__ import annotations

from instep.data.loader import Loader
from instep.data.order import key
from instep.engine.engine import Engine
from instep.engine.passes import OF_PASS, Pass
from instep.engine.update import Update
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.worker.passes.ordinary import weighted


class RepeatPass:
    """Runs passes without any effect but their gradients.

    Args:
        engine: of the worker.
        forward: computes the pass.
        loader: reads its samples again.
        update: has the scale of losses.
    """

    def __init__(self, engine: Engine, forward: Forward, loader: Loader, update: Update) -> None:
        self._engine, self._forward = engine, forward
        self._loader, self._update = loader, update

    def __call__(self, part: Pass, factor: float) -> None:
        """Run a pass of the present step, its loss times a factor."""
        engine, member = self._engine, self._engine.member
        with engine.passes.aside():
            (read,) = self._loader.read([part.samples])
            set_generators(key(member.job.seed, OF_PASS, engine.step, part.number))
            found = self._forward.loss(read.batch, read.size)
            assert found is not None, "a pass in which nothing counts has no gradient to repeat"
            loss, _ = weighted(found.loss, found.factor / engine.where.size)
            self._update.scaler.scale(loss * factor).backward()
