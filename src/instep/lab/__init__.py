"""What can be learnt by breaking or repeating whole runs.

Ways in: `chaos.chaos.break_job` breaks a run and compares its result, `replay.replay` computes
recorded steps again, `determinism.check_determinism` compares two numbers of workers,
`compare.compare` says which alternative pays, `contents` reads recorded samples again,
`netlab.Network` emulates hosts. It starts runs as any client does, and knows nothing of how workers
train.
"""
