"""How a person or a program submits, follows and changes a run.

Ways in: `submit.run_job` for the command line and `instep.train`, `session.join` for
`instep.join`, `running.scale` for a running job. What master and workers do is not known here.
"""
