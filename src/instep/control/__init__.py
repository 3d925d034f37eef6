"""Who is a member, who does what, and when to stop: the master.

`decide` is its mind, pure; `master` its shell, which receives, asks the mind and does what it
says; `journal` is what survives it. What a worker computes is not known here.
"""
