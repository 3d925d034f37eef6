"""Opens image files with Pillow, none with more pixels than memory may be asked for.

A few kB can say that they are an image of any size. Way in: `opened_picture`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from instep.errors import InstepError

MOST_PIXELS = (1 << 28) // 3
"""Pixels of an image: 256 MB of three channels, and from here on Pillow warns."""


@contextmanager
def opened_picture(source: Any) -> Iterator[Any]:
    """In this context an image is open, of which only the head has been read.

    Args:
        source: its path, or an open file of its bytes.

    Raises:
        ValueError: it has too many pixels, or what has been read is no image.
        OSError: it cannot be read, or is no image.
    """
    from PIL import Image

    try:
        with Image.open(source) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(
                    f"it has {width:,} x {height:,} pixels, and at most {MOST_PIXELS:,} are decoded"
                )
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels") from None
    except (OSError, ValueError, MemoryError, InstepError):
        raise
    except Exception as error:  # of damaged files Pillow raises what its readers happen to
        raise ValueError(f"{type(error).__name__}: {error}") from error
