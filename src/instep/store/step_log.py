"""Step records on disk, and their checksums.

`steps.bin` is a plain array of `STEPS`. `steps.crc` beside it has the CRC-32 of each record, in
the same order, 4 bytes each; runs of earlier versions have none. A master that is killed between
the two writes leaves records without a checksum; the next one adds it. Way in: `StepLog` to
write, `check_unchanged` after reading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from instep.checksums import CHECKSUM, of_records
from instep.errors import RunError
from instep.events import STEPS, Appender, cut_torn_record, read_records
from instep.plain_file import plain

STEPS_FILE, CHECKSUMS_FILE = "steps.bin", "steps.crc"


class StepLog:
    """Appends step records of a run, and their checksums.

    Args:
        run: the run folder.

    Raises:
        RunError: a file cannot be opened or repaired.
    """

    def __init__(self, run: Path) -> None:
        cut_torn_record(run / STEPS_FILE, STEPS)
        missing = _repaired(run)
        self._steps = Appender(run / STEPS_FILE)
        self._checksums = Appender(run / CHECKSUMS_FILE)
        self._checksums.write(missing)

    def write(self, records: bytes) -> None:
        """Append records, [any] of `STEPS` as bytes.

        Raises:
            RunError: they could not be written for a while, and too many are waiting.
        """
        self._steps.write(records)
        self._checksums.write(of_records(records, STEPS.itemsize).tobytes())

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._steps.close()
        self._checksums.close()


def _repaired(run: Path) -> bytes:
    """Leave no checksum of a record that is lost; returns those that are missing."""
    cut_torn_record(run / CHECKSUMS_FILE, CHECKSUM)
    records, checksums = (
        path.stat().st_size // dtype.itemsize if path.exists() else 0
        for path, dtype in ((run / STEPS_FILE, STEPS), (run / CHECKSUMS_FILE, CHECKSUM))
    )
    try:
        if checksums > records:
            with open(run / CHECKSUMS_FILE, "r+b", opener=plain) as file:
                file.truncate(records * CHECKSUM.itemsize)
        if checksums >= records:
            return b""
        with open(run / STEPS_FILE, "rb", opener=plain) as file:
            file.seek(checksums * STEPS.itemsize)
            data = file.read((records - checksums) * STEPS.itemsize)
    except OSError as error:
        raise RunError(
            f"{run / CHECKSUMS_FILE} cannot be repaired: {error.strerror}. Get access to it."
        ) from None
    return of_records(data, STEPS.itemsize).tobytes()


def check_unchanged(run: Path, steps: np.ndarray[Any, Any]) -> None:
    """Refuse records that are not what was written.

    Args:
        run: the run folder.
        steps: [records] of `STEPS`, all of them, as they are in the file.

    Raises:
        RunError: names the first of them.
        OSError: the checksums cannot be read.
    """
    written = read_records(run / CHECKSUMS_FILE, CHECKSUM)
    known = min(len(steps), len(written))
    found = of_records(steps[:known].tobytes(), STEPS.itemsize)
    if not np.array_equal(found, written[:known]):
        number = int(np.argmax(found != written[:known])) + 1
        raise RunError(
            f"{run / STEPS_FILE} is damaged: record {number} of {len(steps)} does not match its "
            f"checksum in {CHECKSUMS_FILE}. It holds the times and losses of steps: remove it to "
            f"read the rest of the run, or {CHECKSUMS_FILE} to read the records as they are."
        )
