"""What outlives a failure: checkpoints, and the model that a run ends with.

Way in: `snapshot.py` turns live state into named tensors and plain JSON,
`save.py` puts it on disk while training goes on, `load.py` takes it back
after checking every byte; `restore.py` puts it into a live model. `manifest.py`,
`header.py`, `sound.py` and `retain.py` import no torch.
Nothing here pickles or unpickles, and nothing knows of workers or networks.
"""
