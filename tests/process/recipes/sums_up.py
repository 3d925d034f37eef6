"""`tiny.py` with a callback that logs the sum of each tensor of the model after every step."""

from dataclasses import replace

import tiny

import instep


class Sums:
    """Sees the whole model."""

    def on_step_end(self, context: instep.CallbackContext) -> None:
        """Log the sums."""
        for name, tensor in context.model.state_dict().items():
            context.log(name, tensor.double().sum())


def recipe() -> instep.Recipe:
    """`tiny`, watched."""
    return replace(tiny.recipe(), callbacks=[Sums()])
