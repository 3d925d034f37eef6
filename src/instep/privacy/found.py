"""Noise and epsilon of a job, as a line that one process prints and another reads.

Neither torch nor an accounting library is needed to read it. Ways in: `told`, `read`.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from instep.errors import InstepError, SpecError
from instep.job.privacy import PrivacySpec

PROGRAM = "instep.worker.training.budget"
"""The module that prints the line, of a job on its standard input."""

_SAID = "instep-privacy: "
"""Begins the line: a recipe may print too."""


def told(found: PrivacySpec | InstepError) -> str:
    """A line for `read`."""
    if isinstance(found, InstepError):
        return f"{_SAID}{json.dumps({'error': str(found)})}"
    return f"{_SAID}{json.dumps({'noise': found.noise, 'accounted': found.accounted})}"


def read(text: str, spec: PrivacySpec) -> PrivacySpec:
    """The section of a job with what was found for it.

    Args:
        text: printed by `PROGRAM`.
        spec: the section as it was.

    Raises:
        SpecError: nothing was found; the text says why.
    """
    said = [line.removeprefix(_SAID) for line in text.splitlines() if line.startswith(_SAID)]
    if not said:
        raise SpecError("[privacy]: the recipe could not be built to count its samples; see above.")
    found: dict[str, Any] = json.loads(said[-1])
    if "error" in found:
        raise SpecError(found["error"])
    return replace(spec, noise=found["noise"], accounted=found["accounted"])
