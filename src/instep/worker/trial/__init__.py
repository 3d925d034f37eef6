"""Before the first step: whether the model gives the same result however a batch is cut.

Way in: `reads.try_recipe`, which reads the samples, and `sameness.try_out`. Leaves model, optimizer
and generators as they were; what follows from the verdict, the caller decides.
"""
