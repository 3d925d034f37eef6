"""A metric that gives a value for each sample, where one number is wanted."""

import tiny

import instep


def recipe() -> instep.Recipe:
    made = tiny.recipe()
    return instep.Recipe(
        model=made.model,
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
        validate=made.validate,
        metrics={"right": lambda outputs, target: outputs.argmax(dim=1) == target},
    )
