"""Files that a user may have put anything into, read with care."""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Callable


def content(
    path: pathlib.Path | str,
    largest: int,
    folder: int | None = None,
    judge: Callable[[os.stat_result], None] = lambda status: None,
) -> bytes | str:
    """The file's bytes, or why there are none. It does not wait, and reads no more than `largest` bytes.

    folder: a descriptor of the folder that has the file, which is then no link. judge: raises where a file of this
    status must not be read. Both are asked of the file that is open, so that none can take its place in between.
    """
    more = getattr(os, "O_NONBLOCK", 0)  # or a pipe would wait for its writer
    more |= 0 if folder is None else os.O_NOFOLLOW
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | more, dir_fd=folder)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return "it is no regular file"
            judge(status)
            return file.read(status.st_size) if status.st_size <= largest else f"it has more than {largest} bytes"
    except (OSError, ValueError) as error:  # the latter of a name that no file can have
        return str(error)
