"""Every pair of model and loss, entered in the table as it is imported."""

from pair import PAIRS

from pairs import (  # noqa: F401
    buffers,
    contrasts,
    draws,
    hugging_face,
    hugging_face_more,
    layers,
    losses,
    networks,
    optimizers,
    own_state,
    sparse,
    tokens,
    traps,
)

__all__ = ["PAIRS"]
