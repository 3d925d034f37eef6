"""A training that is built and tried as in a worker, and takes no step of a run.

What a worker would refuse is noted instead of raised, as far as more can be tried after it. Way in:
`Rehearsal`; what passes and optimizer take, `measures.py` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from instep.comm.alone import AloneComm
from instep.data.batches import Batches
from instep.data.loader import Loader, Read, Slice
from instep.data.order import Position
from instep.data.reading.generators import preserved
from instep.engine.member import Member
from instep.engine.passes import parts_of
from instep.engine.state.buffers import Buffers
from instep.engine.trial_result import NOTHING_TO_TRY, Trial
from instep.errors import InstepError
from instep.job.spec import JobSpec
from instep.lab.check.findings import Findings
from instep.recipe.build import Built
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.worker.replica.layout import example_of
from instep.worker.replica.replica import check_model
from instep.worker.training.training import Training
from instep.worker.training.trials import decided_by_job


class Rehearsal(Training):
    """One worker's training of a recipe, built as far as nothing refuses it.

    Args:
        member: of no run.
        recipe: what the job would train.
        device: where.
        findings: get the refusals.
    """

    def __init__(
        self, member: Member, recipe: Recipe, device: torch.device, findings: Findings
    ) -> None:
        self._findings, self.refuse = findings, self._note
        build = partial(super().__init__, member, recipe, device)
        try:
            build()
            self._is_whole = True
        except (Exception, SystemExit) as error:
            self._is_whole = False
            findings.failed(self._reached, error)

    def _note(self, errors: Iterable[InstepError]) -> None:
        """Note all of the reasons, and continue."""
        for error in errors:
            self._findings.refuse(error, "recipe")

    @property
    def _reached(self) -> str:
        """The part that was being built last."""
        there = vars(self)
        if "_trials" in there:
            return "optimizer"
        return "model" if "activity" in there and "_forward" not in there else "data"

    # ---- what there is of it

    @property
    def forward(self) -> Forward | None:
        """The forward pass; None where there is no model."""
        return vars(self).get("_forward")

    @property
    def model(self) -> nn.Module | None:
        """The whole model."""
        return self.forward.model if self.forward is not None else None

    @property
    def built(self) -> Built | None:
        """The optimizer and the scheduler, with the model."""
        return vars(self).get("_built")

    @cached_property
    def loader(self) -> Loader | None:
        """Reads the training dataset, in this process; also where there is no model."""
        if "_inputs" in vars(self):
            return self._inputs.train
        return self._findings.tried("data", self._own_loader) if self.is_divided else None

    def _own_loader(self) -> Loader:
        recipe = self.recipe
        return Loader.of_job(
            self.job,
            recipe.given["train"],
            "training",
            processes=0,
            collate=recipe.collate,
            augment=recipe.augment,
            say=self._findings.warn,
        )

    @property
    def is_divided(self) -> bool:
        """Whether the sides of the datasets are known."""
        return "recipe" in vars(self)

    def lengths(self) -> dict[str, int]:
        """Samples of each dataset: of the sides of a split, if there is one."""
        if not self.is_divided:
            return {}
        validate = self.recipe.validate
        return {"train": len(self.recipe.train), "validate": len(validate) if validate else 0}

    def micro_batch(self) -> Read | None:
        """The first micro-batch of the first step; None where no sample of it can be read."""
        return self._read(lambda where: where.micro_batch(0, parts_of(where, self.job.train)))

    def global_batch(self) -> Read | None:
        """All of the first step."""
        return self._read(lambda where: (where.first, where.stop))

    def _read(self, ends: Callable[[Position], tuple[int, int]]) -> Read | None:
        loader = self.loader
        if loader is None:
            return None
        where = self._all_batches(loader).in_steps(self.job).of(1)
        with closing(loader.read([Slice(where.epoch, *ends(where))])) as reads:
            read = next(reads)
        return read if read.size else None

    def _all_batches(self, loader: Loader) -> Batches:
        """Batches of each commit; also where building came to no plan of it."""
        known = vars(self).get("batches")
        return known if known is not None else Batches.of_job(self.job, loader.samples)

    def end(self) -> None:
        """Close what reads the datasets."""
        inputs = vars(self).get("_inputs")
        for each in inputs.loaders if inputs is not None else filter(None, [self.loader]):
            each.close()

    # ---- trials

    def try_all(self) -> Trial | None:
        """Try passes, optimizer and validation as before the first step of a run.

        Returns:
            The verdict that a run of one worker would have; None where something is refused.
        """
        findings, there = self._findings, vars(self)
        if "_trials" not in there:
            findings.leave_out("passes: there is no model, or nothing to read, to try them with")
            return None
        trials, built = self._trials, self.built
        trial = findings.tried("passes", lambda: trials.run(built=built))
        if trial is None:
            findings.tried("optimizer", lambda: trials.try_kept(NOTHING_TO_TRY, built))
            findings.tried("passes", lambda: trials.try_validation(NOTHING_TO_TRY))
            return None
        if not self._is_whole:
            return decided_by_job(self.job, self.recipe, trial, draws_by_block=False)
        self.engine.state.trial = trial
        findings.tried("verdict", lambda: self._agree_on_trial(AloneComm()))
        self._try_buffers()
        return self._trial

    def _try_buffers(self) -> None:
        """Refuse buffers that workers cannot agree on."""
        train = self.job.train
        parts = self.job.per_commit.micro_batches
        exact = parts if train.determinism == "bits" else 0
        model = self.engine.model
        self._findings.tried("model", lambda: Buffers(model, parts=exact, alone=parts == 1))

    def try_mesh(self, job: JobSpec) -> bool:
        """Find out how the model is split over the processes of a replica, as its first one does.

        Args:
            job: with its `[mesh]`.

        Returns:
            Whether the blocks of a pipeline draw random numbers.
        """
        model, loader, forward, findings = self.model, self.loader, self.forward, self._findings
        if model is None or loader is None or forward is None:
            return False
        findings.tried("mesh", lambda: check_model(model))
        if job.mesh.same_batch == 1:
            return False

        def find() -> Any:
            from instep.parallel.layout import find_layout  # takes half as long as torch

            example = example_of(forward, loader, job, self.batches)
            with preserved():
                return find_layout(model, job.mesh, example, timed=False)

        layout = findings.tried("mesh", find)
        if layout is None:
            return False
        plan = layout.plan
        findings.parts["mesh"] = {
            "cuts": list(layout.cuts),
            "tensor": {name: cut.style for name, cut in plan.cuts.items()} if plan else {},
        }
        if plan is not None and not plan.cuts:
            findings.warn(f"mesh.tensor = {job.mesh.tensor} cuts no layer of this model.")
        return bool(layout.draws)
