"""Parameters, gradients and optimizer state shared out over ranks (ZeRO 2 and 3).

`sharded.py` is what others call; it hands the work to FSDP2. `lockstep.py` makes sure that all
ranks are at the same block, and `block_order.py` brings them there. `rows.py` shares out what lies
within a stage of a pipeline. Steps and strategies are not known here.
"""
