"""How one global batch is computed by several workers as if it were in one place.

What a pass may ask of the passes of other workers while it computes: statistics of the whole
batch (`batch_norm.py`), its embeddings (`cached.py`). And how a pass over several micro-batches
draws what each of them would have drawn alone (`draws.py`). Steps, strategies and recipes are
unknown here.
"""
