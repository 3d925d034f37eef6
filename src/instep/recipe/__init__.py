"""What the user brings, built and checked: model, data, loss, optimizer, and how they are used.

Way in: `build.Recipe` and `build.build`; `forward` goes from a batch to a loss. Nothing here
knows of workers or steps.
"""
