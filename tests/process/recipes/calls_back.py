"""Writes every call to its callbacks into a file of the run's folder."""

import json
import time

import slow_tiny
import splits
import tiny
import torch

import instep


class Writes(instep.Callback):
    def __init__(self, name, sleeps=0.0):
        self.name, self.sleeps = name, sleeps

    def write(self, context, moment, **more):
        line = {"who": self.name, "moment": moment, "step": context.step, "loss": context.loss}
        line |= {"again": context.repeated, "lr": context.lr, "samples": context.samples}
        with open(context.run / "written.jsonl", "a") as file:
            file.write(json.dumps(line | more) + "\n")
        time.sleep(self.sleeps)

    def on_step_end(self, context):
        self.write(context, "on_step_end")
        if self.name == "first":
            context.log("twice_the_loss", 2 * context.loss)

    def on_evaluate(self, context, metrics):
        self.write(context, "on_evaluate", values=dict(metrics))

    def on_log(self, context, values):
        self.write(context, "on_log", values=dict(values))

    def on_save(self, context, checkpoint):
        self.write(context, "on_save", checkpoint=checkpoint.name, there=checkpoint.is_dir())


def recipe(pause_s=0.0, sleeps=0.0, fails_at=0, spoils=""):
    made = slow_tiny.recipe(pause_s) if pause_s else tiny.recipe()  # each draws a model
    every = [Writes("first"), Writes("second", sleeps)]
    if fails_at:
        every.append(Fails(fails_at))
    if spoils:
        every.append(Spoils(spoils))
    object.__setattr__(made, "callbacks", every)
    return made


class Fails(instep.Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, context):
        if context.step == self.step:
            raise RuntimeError("this callback cannot go on")


class Spoils(instep.Callback):
    def __init__(self, how):
        self.how = how

    def on_step_end(self, context):
        if self.how == "writes":
            for parameter in context.model.parameters():
                parameter.add_(1.0)
        elif self.how == "freezes":
            context.model[0].requires_grad_(False)
        else:
            context.model.eval()


def split(pause_s=0.0, fails="", **options):
    """A model that a mesh can split."""
    made = splits.recipe(pause_s=pause_s, **options)
    every = [Writes("first"), Writes("second"), *([Asks(fails)] if fails else [])]
    object.__setattr__(made, "callbacks", every)
    return made


class Asks(instep.Callback):
    """Calls the model, as one would to draw something of it."""

    def __init__(self, how):
        self.how = how

    def on_step_end(self, context):
        if self.how == "calls":
            context.model.eval()(torch.ones(2, 5, dtype=torch.float64))
        elif context.step != 7:
            pass
        elif self.how == "sleeps":
            time.sleep(12)
        else:
            raise RuntimeError("this callback cannot go on")
