"""A trial before the first step: does the model give the same result however a batch is cut?

Way in: `reads.try_recipe`, which reads the samples, and `sameness.try_out`. Model, optimizer and
generators are left as they were; the caller decides what follows from the verdict.
"""
