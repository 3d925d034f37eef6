"""Files at URLs that fsspec reads, as whole local copies.

Ways in: `remote.Remote` for shards, `elsewhere.copies_of` for raw files. fsspec moves bytes
(`download.py`); its own caches hand out half-written files.
"""
