"""What a run did, for people: read from the files in its folder, and from nothing else.

`run_folder` reads, `audit` proves, `summary` condenses, `page` and `timeline`
draw; `live` and `tensorboard` show the same events while they happen. Nothing
here starts a process, imports torch, or changes what a run recorded.
"""
