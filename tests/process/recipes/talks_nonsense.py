"""A worker that sends its master, once, what no master can use."""

import gc
from pathlib import Path

import tiny
from first_come import first
from torch import Tensor, nn

import instep
from instep.comm.protocol.messages import Records
from instep.engine.member import Member

AFTER = 20


def recipe(once: str) -> instep.Recipe:
    made = tiny.recipe()
    return instep.Recipe(
        model=Model(made.model, Path(once)),
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
    )


class Model(nn.Module):
    def __init__(self, inner: nn.Module, once: Path) -> None:
        super().__init__()
        self.inner, self.once, self.passes = inner, once, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == AFTER and first(self.once):
            (member,) = (each for each in gc.get_objects() if isinstance(each, Member))
            member._connection.send(Records(ledger=b"", steps=b"no record"))
        outputs: Tensor = self.inner(inputs)
        return outputs
