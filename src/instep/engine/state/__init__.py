"""State that a process holds between two steps: that of the last commit, whole or its part.

Way in: `committed.CommittedState`.
"""
