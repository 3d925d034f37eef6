"""A loop of its own in which each process is a participant of averaging.

Arguments: participants, whether local optimizers are `kept`, rounds that a scheduler is stepped by
(`session` or `epoch`), seconds of a pause in each iteration, epochs, and perhaps `gaps`.
"""

import sys
import time

import averages
from torch import nn
from torch.utils.data import DataLoader

import instep

PARTICIPANTS, LOCAL, ADVANCED = int(sys.argv[1]), sys.argv[2], sys.argv[3]
PAUSE_S, EPOCHS = float(sys.argv[4]), int(sys.argv[5])
GAPS = "gaps" in sys.argv
TRAIN = {"global_batch": 20, "max_grad_norm": 1.5, "threads": 1, "determinism": "bits"}
SYNC = {
    "name": "averaging",
    "participants": PARTICIPANTS,
    "options": {"local_steps": 3, "local_optimizers": LOCAL},
}


def main() -> None:
    train = {**TRAIN, "epochs": EPOCHS}
    with instep.join(name="own", train=train, sync=SYNC, checkpoint={"every": 2}) as session:
        model = averages.model()
        optimizer = averages.adam(model.parameters())
        scheduler = averages.half_way_down(optimizer)
        data = averages.Gaps() if GAPS else averages.pairs()
        parts = model, optimizer, DataLoader(data, batch_size=10 if PARTICIPANTS == 2 else 20)
        if ADVANCED == "session":
            model, optimizer, loader = session.prepare(*parts, scheduler=scheduler)
        else:
            model, optimizer, loader, scheduler = session.prepare(*parts, scheduler)
        for _ in session.epochs():
            model.train()
            for inputs, target in loader:
                assert session.sync_gradients
                optimizer.zero_grad()
                session.backward(nn.functional.mse_loss(model(inputs), target))
                assert all(parameter.grad is not None for parameter in model.parameters())
                time.sleep(PAUSE_S)
                optimizer.step()
            if ADVANCED == "epoch":
                scheduler.step()
            mine = float(next(model.parameters()).detach().sum())
            (of_all,) = session.sum(mine)
            assert abs(of_all - session.size * mine) < 1e-9


if __name__ == "__main__":
    main()
