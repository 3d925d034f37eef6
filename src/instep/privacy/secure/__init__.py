"""Secure sums: a sum of what several members have, of which nobody sees a single part.

The protocol is that of Bonawitz et al. 2017 (doi:10.1145/3133956.3133982), with masks over whole
numbers of 32 bits, which cancel exactly: the sum has the bits of an open one. `members.py` is what
one member does and `opening.py` what whoever adds up does; `over_ranks.py` has the members of a
group of processes do it. `masks.py` and `shamir.py` are what it is made of.
"""
