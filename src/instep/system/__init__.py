"""Facts about this machine and its processes: signals, stacks, kernels, addresses, output.

Way in: each file for itself. Knows nothing of runs, jobs or models; everything above may ask it.
"""
