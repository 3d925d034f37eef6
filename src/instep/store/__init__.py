"""What the folder of a run holds, and who holds it.

`folder` makes it and keeps others away, `ledger` writes the record of commits, `run_folder`
reads all of it for everybody, `audit` proves from the ledger that each sample was used once.
Nothing here starts a process or imports torch.
"""
