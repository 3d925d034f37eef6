"""Which bytes of a CSV file are in quotes, and so where its records are.

`splitter.py` goes over bytes with five states (`states.py`), by the parity of quotes where that is
right (`parity.py`), else by a loop that Numba compiles (`loops.py`). Ways in: `splitter.Splitter`,
`splitter.passed`.
"""
