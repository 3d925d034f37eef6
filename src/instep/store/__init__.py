"""What the folder of a run holds, and which process has it locked.

Ways in: `run_folder.RunFolder` reads everything; `folder` makes and locks it, `ledger.Ledger`
writes the record of committed steps, and `audit.audit` checks there that each sample was used
once. Nothing here starts a process or imports torch.
"""
