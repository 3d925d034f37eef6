"""Tensor parallelism for any model: one matrix product on several ranks, without a plan by hand.

`search.py:find_plan` finds how a model's layers are cut; a trial (`trial.py`) judges every cut.
`apply.py:apply_plan` cuts the model. Data, steps and strategies are not known here.
"""

from instep.parallel.tensor.apply import apply_plan, squared_norm
from instep.parallel.tensor.plan import Plan
from instep.parallel.tensor.search import find_plan

__all__ = ["Plan", "apply_plan", "find_plan", "squared_norm"]
