"""What can be learnt by breaking or repeating whole runs.

`chaos` breaks a run and has it judged, `replay` computes recorded steps again, `determinism`
compares two numbers of workers, `contents` reads recorded samples again, `netlab` emulates
hosts. It starts runs as any client does, and knows nothing of how workers train.
"""
