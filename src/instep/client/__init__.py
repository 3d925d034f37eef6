"""How a person or a program submits, follows and changes a run.

Ways in: `submit.run_job` for the command line and `instep.train`, `session` for `instep.join`,
`live_run` for a run that goes on. What master and workers do is not known here.
"""
