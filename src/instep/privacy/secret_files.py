"""Where the secret of a run lies: in the home of its user, and beside no checkpoint.

A run's folder is copied, published and thrown away; its secret is not in it. Whoever has the
secret and the released parameters can take the noise off. Way in: `create`, `load`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from instep.errors import SpecError
from instep.plain_file import PRIVATE, plain

SECRET_BYTES = 32

ENVIRONMENT = "INSTEP_SECRETS"
"""Names another folder for secrets."""


def folder() -> Path:
    """The folder of the secrets of all runs of this user."""
    if given := os.environ.get(ENVIRONMENT):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "instep" / "secrets"


def new_secret() -> bytes:
    """256 bits from the system's generator."""
    return secrets.token_bytes(SECRET_BYTES)


def create(run_id: str) -> None:
    """Make the secret of a new run.

    Raises:
        SpecError: it cannot be written.
    """
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder() / run_id, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
        with open(descriptor, "wb") as file:
            file.write(new_secret())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SpecError(
            f"[privacy]: the secret of the run cannot be written into {folder()}: "
            f"{error.strerror}. Name another folder by the environment variable {ENVIRONMENT}."
        ) from error


def load(run_id: str) -> bytes:
    """The secret of a run.

    Raises:
        SpecError: it is not on this machine, or is damaged.
    """
    path = folder() / run_id
    try:
        with open(path, "rb", opener=plain) as file:
            secret = file.read()
    except OSError as error:
        raise SpecError(
            f"[privacy]: the secret of the run is not at {path} ({error.strerror}). With another "
            "one the run would use its budget twice. Copy the file from the machine on which the "
            "run began; or begin a new run."
        ) from error
    if len(secret) != SECRET_BYTES:
        raise SpecError(f"[privacy]: {path} is damaged: {len(secret)} bytes. Begin a new run.")
    return secret
