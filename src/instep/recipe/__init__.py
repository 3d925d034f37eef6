"""The user's recipe, built and checked: model, data, loss, optimizer.

Ways in: `recipe.Recipe` and `build.build`; `forward` goes from a batch to a loss. Workers and steps
are not known here.
"""
