"""Pipelines: a model that is a sequence of blocks, cut into stages for the ranks of a group.

`pipeline.py` is what others call. `blocks.py` finds the blocks, `trial.py` tries cuts,
`measure.py` and `cuts.py` choose them, `batch.py` passes a batch, `stages.py` runs one stage,
`schedule.py` says in which order. Nothing is traced: each stage runs the model's own forward pass.
"""

from instep.parallel.pipeline.pipeline import Pipeline, Total, find_cuts

__all__ = ["Pipeline", "Total", "find_cuts"]
