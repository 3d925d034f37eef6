"""The participants of a run that have data of their own, in a table."""

from __future__ import annotations

from instep.report.figures.participants import of_participants
from instep.report.page.markup import Html, listing, section
from instep.store.run_folder import RunFolder
from instep.units import readable_count
from instep.words import short_number


def participants(folder: RunFolder) -> Html:
    """What each has, and the metrics of the model on its part of the validation set."""
    each = of_participants(folder)
    if each is None:
        return Html("")
    counts = {"samples": each.samples, "epochs finished": each.epochs}
    if each.validation_samples:
        counts["validation samples"] = each.validation_samples
    note = "Each trains on samples of its own, in epochs of its own."
    if each.metrics:
        note += " Metrics are those of the last validation, on its part of the validation set."

    def row(number: int) -> list[str]:
        shown = [readable_count(values[number]) for values in counts.values()]
        return [str(number), *shown, *(short_number(m[number]) for m in each.metrics.values())]

    head = ["participant", *counts, *each.metrics]
    return section(
        "Participants", listing(head, range(len(each.samples)), row, "participants"), note=note
    )
