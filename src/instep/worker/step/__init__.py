"""One step from its passes to a commit: the engine, the state that it commits, who computes what.

Way in: `engine.Engine`. Knows no loop, no dataset and no files but the ledger; what a loss is,
its caller says.
"""
