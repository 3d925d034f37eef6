"""What is saved of a run: checkpoints, and the model that it ends with.

Way in, to write: `snapshot.py` and `packing.py` turn live state into named tensors and plain
JSON, and `save.py` writes that to the disk while training continues (`files/staging.py` is one file
of it; `retention.py` says which checkpoints are kept). To read: `intact.py` finds the newest
checkpoint of which every byte is right, `load.py` reads it, `restore.py` puts it into a live
model. Where a replica is a mesh, `boxes.py` says which part of a tensor a rank has, `pieces.py`
reads any part of any checkpoint. `files/` has what the files are, `export/` what leaves a run: the
whole model, or the folder that `from_pretrained` opens. `broadcast.py` copies state from a peer's
memory; `compare.py` and `digest.py` compare states.

Nothing here pickles or unpickles, or knows workers and networks. `files/manifest.py`, `intact.py`,
`files/model_file.py`, `retention.py`, `export/export.py` and `compare.py` import no torch.
"""
