"""Errors of bytes that are no message or file of the kind that is wanted."""

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised by msgspec; before 0.23 text that is no UTF-8 raises an error of Python's."""
