"""What is saved of a run: checkpoints, and the model that it ends with.

Way in, to write: `snapshot.py` and `packing.py` turn live state into named tensors and plain
JSON, and `save.py` writes that to the disk while training continues (`staging.py` is one file
of it; `retention.py` says which checkpoints are kept). To read: `intact.py` finds the newest
checkpoint of which every byte is right, `load.py` reads it, `restore.py` puts it into a live
model. Where a replica is a mesh, `boxes.py` says which part of a tensor a rank has, `pieces.py`
reads any part of any checkpoint, and `whole.py` writes the whole model. `manifest.py` and
`model_file.py` say what the files are; `broadcast.py` copies state from a peer's memory,
`export.py` the model out of a checkpoint, `hugging_face.py` what `from_pretrained` needs beside
it; `compare.py` and `digest.py` compare states.

Nothing here pickles or unpickles, or knows workers and networks. `manifest.py`, `intact.py`,
`model_file.py`, `retention.py`, `export.py` and `compare.py` import no torch.
"""
