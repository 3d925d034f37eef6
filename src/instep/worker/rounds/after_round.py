"""What the log is told of participants after a commit: how far apart they are, and what was lost.

Nothing here decides anything. Way in: `spread_of`, `report_spread` and `report_lost`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.engine.member import Member
from instep.job.spec import JobSpec
from instep.sync.rounds.averaging import Averaging
from instep.sync.rounds.spread import Spread
from instep.sync.rounds.streaming import Streaming
from instep.sync.sign_vote import SignVote
from instep.words import listed


def spread_of(strategy: object) -> Spread | None:
    """How far the participants of the last round were apart; None without rounds."""
    return strategy.spread if isinstance(strategy, Averaging | Streaming) else None


def report_spread(member: Member, spread: Spread | None, step: int) -> None:
    """Tell how far they were apart; one rank does."""
    if spread is not None:
        figures = {k: v for k, v in spread._asdict().items() if v is None or math.isfinite(v)}
        member.emit("participants_apart", step=step, **figures)


def report_lost(member: Member, job: JobSpec, strategy: object, *, tells: bool) -> None:
    """Warn of participants or voters that began anew, as what they remembered was lost.

    Args:
        member, job: whose.
        strategy: all ranks call this after each commit.
        tells: whether it is this rank that tells it.
    """
    if not isinstance(strategy, Averaging | Streaming | SignVote):
        return
    carried = strategy.carried
    if carried is None or not carried.lost:
        return
    lost, carried.lost = carried.lost, {}
    if tells:
        text = _lost_in_words(job, sorted(lost), max(lost.values()))
        member.emit("warning", text=text)


def _lost_in_words(job: JobSpec, numbers: Sequence[int], last: int) -> str:
    """`participants 1, 3 began anew: ...`, from the step of what they remembered."""
    sync, kept = job.sync, list[str]()
    if job.mesh.ranks == 1 and sync.rounds is not None:
        kept += ["models"] if sync.streams else []
        kept += ["states of optimizers"] if job.keeps_optimizers else []
        kept += ["local parameters"] if sync.rounds.local_parameters else []
    kept += ["momentum"] if sync.votes else ["what sync.codec left out"] * (sync.codec != "none")
    who = "voter" if sync.votes else "participant"
    return (
        f"{who}{'s' * (len(numbers) > 1)} {listed(numbers, 8)} began anew: what they remembered, "
        f"of step {last} at the latest, was lost with the processes that had it "
        f"({', '.join(kept)})."
    )
