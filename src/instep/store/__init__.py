"""What the folder of a run holds, and which process has it locked.

`folder` makes and locks it, `ledger` writes the record of committed steps, `run_folder` reads
everything, `audit` checks in the ledger that each sample was used once. Nothing here starts
a process or imports torch.
"""
