"""The master: who is a member, who does what, and when to stop.

`decide` is a pure function over `state`; `master` is the shell that has it decide on what
`processes` notices, and carries its decisions out; `journal` keeps them, for the next master.
Start with `state`.
What a worker computes is not known here.
"""
