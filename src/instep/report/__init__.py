"""What a run did, for people: read from the files in its folder, and from nothing else.

`figures/` computes, `page/` draws the HTML report, `terminal/` prints; `timeline.py` and
`tensorboard.py` write files for other programs to show. Their docstrings have the ways in. Nothing
here starts a process, imports torch, or changes what a run recorded.
"""
