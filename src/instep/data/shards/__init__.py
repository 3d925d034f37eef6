"""Prepared samples: a folder of Arrow files of about even size, and a manifest.

A sample is a dict of numbers, arrays, text or bytes; all samples have the same columns
(`columns.py`). `views.py` is how a column lies in memory, `encode.py` makes that of samples,
`arrow_in.py` of record batches of other programs. `manifest.py` lists the files; `dataset.py` reads
them, mapped into memory, and `hugging_face.py` the files of that package; `rows.py` is what both
share. `hosts/` has what lies on one host, for the others. Nothing here knows where raw data come
from, or processes. Importing this package imports neither pyarrow nor torch. Way in:
`dataset.Shards`.
"""
