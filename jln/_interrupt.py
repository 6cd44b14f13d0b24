"""Handling of ^C while `python -m jln` starts.

Python imports the package first, and JAX with it, which takes a second. An exception would end in a traceback, or in
the extension module that is being imported and catches it.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator


def _deadly() -> None:
    """Let ^C end the process without a word, until a command runs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not what else is imported by, or ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if sys.argv[:1] == ["-m"] and "jln" in sys.orig_argv:
    _deadly()


@contextlib.contextmanager
def as_exception() -> Iterator[None]:
    """Let ^C raise KeyboardInterrupt again, for a command that says that it was interrupted."""
    deadly = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if deadly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if deadly:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
