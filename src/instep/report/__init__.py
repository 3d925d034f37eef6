"""What a run did, for people: read from the files in its folder, and from nothing else.

`store/run_folder.py` reads; `proof` and `summary` condense, `page` and `timeline` draw;
`live` and `tensorboard` show the same events while they happen. Nothing here starts a
process, imports torch, or changes what a run recorded.
"""
