"""What can be learnt by breaking or repeating whole runs.

`chaos` breaks a run and has it judged, `replay` computes recorded steps again, `determinism`
compares two numbers of workers, `contents` reads recorded samples again, `netlab` emulates
hosts. All of it stands on runs as any client starts them.
"""
