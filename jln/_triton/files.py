"""Files that a user may have put anything into, read with care."""

from __future__ import annotations

import os
import pathlib
import stat


def content(path: pathlib.Path, largest: int) -> bytes | str:
    """The file's bytes, or why there are none. It does not wait, and reads no more than `largest` bytes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # asked before it is opened: a pipe would wait for its writer
            return "it is no regular file"
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(size) if size <= largest else f"it has more than {largest} bytes"
    except (OSError, ValueError) as error:  # the latter of a name that no file can have
        return str(error)
