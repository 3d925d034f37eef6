"""The rules of `[stop]` over one run: also where a master was lost, or steps were rolled back.

What a rule does is in `stop_rules.py`. This keeps what they have evaluated in step with
the run's files. Way in: `Verdicts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from instep.comm.protocol.messages import Figures
from instep.control.decisions.events import RolledBack
from instep.control.stop_rules import Fired, Judge, recorded
from instep.job.spec import JobSpec
from instep.store.run_folder import RunFolder


class Verdicts:
    """What the rules of a job make of its figures.

    Args:
        job: with the rules.
        earlier: figures of the run before this session, in order.
    """

    def __init__(self, job: JobSpec, earlier: Iterable[Figures]) -> None:
        self._job, self._evaluates = job, job.stop.by_step or job.stop.by_metric
        self.begin(earlier)

    def begin(self, earlier: Iterable[Figures]) -> None:
        """Know only these figures, from the beginning of the run or of a checkpoint."""
        self._judge = Judge(self._job.stop, earlier)
        self._void = (-1, 0)  # generation in which results after a step were found wrong; the step

    def of(self, figures: Figures, generation: int, *, again: bool) -> Fired | None:
        """Evaluate figures of a committed step; `again` if another master may have done so."""
        void_in, step = self._void
        if figures.step > step and generation <= void_in:
            return None
        return self._judge.evaluate(figures, again=again)

    def take_over(self, folder: RunFolder, begin: int) -> list[Fired | RolledBack]:
        """Evaluate the records of a master that was lost.

        Args:
            folder: of the run.
            begin: the step that this session began from.

        Returns:
            What it may not have decided on.
        """
        if not self._evaluates:
            return []
        self._evaluate(folder, int(folder.steps["step"].max(initial=0)))  # of lost workers too
        step = _found_wrong(folder.events)
        before = self.roll_back(folder, step) if step is not None else []
        return [*before, *self._fired_after(folder, begin)]

    def roll_back(self, folder: RunFolder, step: int) -> Sequence[Fired | RolledBack]:
        """The workers return to a step in memory: figures of later ones may be wrong.

        Returns:
            What that step fired, as the worker that asked may be lost; else that nothing did.
        """
        if not self._evaluates:
            return []
        generations = folder.named("generation_started")
        self._void = generations[-1]["generation"] if generations else 0, step
        self._evaluate(folder, step)
        return self._fired_after(folder, step - 1) or [RolledBack(step)]

    def _evaluate(self, folder: RunFolder, until: int) -> None:
        figures = recorded(folder.steps, folder.validations, until)
        self._judge = Judge(self._job.stop, figures)

    def _fired_after(self, folder: RunFolder, step: int) -> list[Fired]:
        """What the newest figures fired; those of the run's last step are not evaluated."""
        ready = folder.named("worker_ready")
        last = {ready[-1].get("last_step") if ready else None, self._job.train.stop_after_steps}
        return [fired for fired in self._judge.fired_after(step) if fired.step not in last]


def _found_wrong(events: Iterable[dict[str, Any]]) -> int | None:
    """The last clean step where corruption was found and no group has formed since."""
    found = None
    for event in events:
        if event["event"] == "corruption_found" and event["clean_step"] >= 0:
            found = event["clean_step"] if found is None else min(found, event["clean_step"])
        elif event["event"] in ("generation_started", "run_started"):
            found = None
    return found
