"""The user's recipe, built and checked: model, data, loss, optimizer.

Way in: `build.Recipe` and `build.build`; `forward` goes from a batch to a loss. Workers and steps
are not known here.
"""
