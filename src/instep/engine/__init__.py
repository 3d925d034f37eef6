"""One commit, from the passes of a step to the state that it leaves.

Way in: `engine.Engine`. Units of work are given in, gradients leave the passes, all members
exchange them and vote, and the update is applied: `state/` is what a process holds of the last
commit, and `served/` the optimizers of a run with servers. Loops, roles, and what is trained are
not known here.
"""
