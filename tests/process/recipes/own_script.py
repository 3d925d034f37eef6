"""A script with a loop of its own, whose workers are replaced: it validates and moves its
scheduler between epochs. Arguments: epochs, seconds of a pause in each iteration and validation.
"""

import sys
import time

import tiny
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import instep

EPOCHS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2])
TRAIN = {"global_batch": 16, "micro_batches": 4, "determinism": "bits", "epochs": EPOCHS}


def main() -> None:
    with instep.join(seed=5, train=TRAIN, checkpoint={"every": 20}) as session:
        made = tiny.recipe()
        model: nn.Module = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        scheduler, loader, held_out, optimizer, model = session.prepare(
            scheduler, made.train, DataLoader(made.validate, batch_size=5), optimizer, model
        )
        (processes,) = session.sum(1.0)  # then; a newcomer is told so when there are others
        assert processes in (1, 2, 3, 4)
        for epoch in session.epochs():
            of_all, processes = session.sum(epoch, 1.0)  # at the begin of an epoch too
            assert of_all == epoch * processes
            model.train()
            for inputs, target in loader:
                loss = functional.cross_entropy(model(inputs), target)
                optimizer.zero_grad()
                session.backward(loss)
                time.sleep(PAUSE_S)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                session.log("step/twice", 2 * session.step)
            validate(session, model, held_out, len(made.validate))
            scheduler.step()


def validate(session: instep.Session, model: nn.Module, held_out: object, samples: int) -> None:
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for inputs, target in held_out:
            time.sleep(3 * PAUSE_S)  # as long as the epoch: half of all kills find it here
            every = session.gather_for_metrics({"out": model(inputs)})
            outputs.append(every["out"])
            targets.append(session.gather_for_metrics(target))
    out, target = torch.cat(outputs), torch.cat(targets)
    assert len(out) == len(target) == samples
    loss = float(functional.cross_entropy(out.double(), target))
    rows, processes = session.sum(len(out), 1.0)
    assert rows == samples * processes
    right = float((out.argmax(dim=1) == target).double().mean())
    session.validated(samples, loss=loss, accuracy=right)


if __name__ == "__main__":
    main()
