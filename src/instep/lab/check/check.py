"""Whether a job would start, what it would be, and all that refuses it; nothing is started.

What the job file alone shows comes first, and needs no torch. Way in: `check_job`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from instep.client.job_checks import refusals
from instep.errors import InstepError
from instep.job.every_refusal import CheckedTables, names_in
from instep.job.spec import JobSpec
from instep.lab.check import figures
from instep.lab.check.findings import Findings
from instep.recipe.given import given

Say = Callable[[str], None]


def check_job(refused: CheckedTables, say: Say = lambda text: None) -> Findings:
    """Check a job, as far as one process can.

    Args:
        refused: the job, and what is wrong with its file.
        say: called with what is done next.
    """
    findings = Findings(say)
    for error in refused.errors:
        findings.refuse(error, "job file")
    job = refused.job
    if job is None:
        findings.leave_out("all else: what is refused leaves no job to check")
        return findings
    findings.parts["job"] = figures.of_job(job)
    findings.say("checking the job")
    for wrong in _every(job, findings):
        if not refused.left_out.intersection(names_in(str(wrong))):
            findings.refuse(wrong, "job")
    _note_left_out(job, findings)
    if job.recipe.endswith(":__main__"):
        findings.parts["batches"] = figures.of_batches(job, 0)
        findings.leave_out(
            "model, data, optimizer and passes: a loop of your own makes them while it runs, so "
            "only the settings of the job are checked"
        )
    elif not refused.has_recipe or not _is_there(job):
        findings.parts["batches"] = figures.of_batches(job, 0)
        findings.leave_out("recipe, data, model, optimizer and passes: there is no recipe")
    elif job.own_data == "parts":
        findings.leave_out("recipe and passes: data.parts of participants lie on hosts")
    else:
        findings.say("importing torch")
        from instep.lab.check.recipe_check import check_recipe

        check_recipe(job, findings)
    return findings


def _every(job: JobSpec, findings: Findings) -> list[InstepError]:
    """The refusals before any process starts; a check that fails itself is said."""
    found: list[InstepError] = []
    checks = refusals(job)
    while True:
        try:
            found.append(next(checks))
        except StopIteration:
            return found
        except Exception as error:  # of a check that relies on what an earlier one refused
            findings.failed("job", error)
            return found


def _is_there(job: JobSpec) -> bool:
    return given(job.recipe) is not None or Path(job.recipe.rpartition(":")[0]).is_file()


def _note_left_out(job: JobSpec, findings: Findings) -> None:
    """Note what needs other processes, hosts or files, and when a run tries it."""
    if job.mesh.ranks > 1:
        findings.leave_out(
            f"[mesh] {job.mesh.axes}: at its start a run compares gradients, optimizer and "
            "validation of a replica with one process; figures here are of the whole model"
        )
    if job.sync.served:
        findings.leave_out(f"servers of {job.sync.name}: a run starts them")
    if job.launch.launcher != "local":
        findings.leave_out(f"hosts of launch.on = {job.launch.launcher!r}: nothing is started")
    if job.prepare.sources:
        findings.leave_out(
            f"[prepare]: a run makes {job.prepare.to} first; here it is taken as it is"
        )
