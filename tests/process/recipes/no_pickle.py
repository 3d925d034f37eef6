"""From its import on, whatever would unpickle anything fails; it is tiny.py otherwise."""

import _pickle
import pickle

import tiny


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("something was to be unpickled")


class Refusing:
    def __init__(self, *_: object, **__: object) -> None:
        refuse()


for module in (pickle, _pickle):
    module.loads = module.load = refuse
    module.Unpickler = Refusing
pickle._Unpickler = pickle._loads = pickle._load = Refusing

recipe = tiny.recipe
