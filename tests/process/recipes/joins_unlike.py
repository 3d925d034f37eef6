"""Joins a run with a loss that only process 0 knows to be a mean over samples."""

import os
import sys
from dataclasses import replace

import tiny
from torch import nn

import instep


def own(outputs, target):
    """The same loss, as a function of the user's own."""
    return nn.CrossEntropyLoss()(outputs, target)


def recipe() -> instep.Recipe:
    """As told above."""
    made = tiny.recipe()
    return made if os.environ["SLURM_PROCID"] == "0" else replace(made, loss=own)


train = {"global_batch": 16, "steps": 2}
session = instep.join(recipe, name="unlike", runs=sys.argv[1], train=train, quiet=True)
for _ in session.steps():
    pass
