"""Learns until it no longer improves: the scheduler is told the validation loss."""

import tiny
import torch

import instep

PATIENCE, FACTOR = 1, 0.5


def recipe(pause_s: float = 0.0) -> instep.Recipe:
    made = tiny.recipe()
    train = made.train
    if pause_s:
        import slow_tiny

        train = slow_tiny.Slow(train, pause_s)
    return instep.Recipe(
        model=made.model,
        loss=made.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        scheduler=scheduler,
        train=train,
        validate=made.validate,
        callbacks=[Rates()],
    )


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=PATIENCE, factor=FACTOR, threshold=0.02
    )


class Rates(instep.Callback):
    def on_evaluate(self, context, metrics):  # type: ignore[no-untyped-def]
        with open(context.run / "rates.txt", "a") as file:
            file.write(f"{context.step} {context.lr!r} {metrics['loss']!r}\n")
