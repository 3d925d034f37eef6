"""A family as an ordinary recipe, so that `instep run` can train it on any mesh:

recipe = "tests/families/recipe.py:family"
arguments = { name = "GPT, tied" }
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import instep


def family(name: str, dtype: str = "float32") -> instep.Recipe:
    """The recipe of a family. Those with `BatchNorm` want `train.batch_norm = "global"`."""
    here = Path(__file__).resolve().parent
    sys.path += [str(here), str(here.parent / "parity")]
    from twenty_five import PAIRS

    return instep.Recipe(**PAIRS[name].make(getattr(torch, dtype)).recipe())
