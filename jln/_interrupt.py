"""^C while `python -m jln` starts.

It imports the package first, and JAX with it, which takes a second: an exception would end in a traceback, or in the
extension module that is being imported and catches it.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator


def _deadly() -> None:
    """Until a command runs ^C ends the process, without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not what else is imported by, or ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if sys.argv[:1] == ["-m"] and "jln" in sys.orig_argv:
    _deadly()


@contextlib.contextmanager
def as_exception() -> Iterator[None]:
    """For a command, which says that it was interrupted."""
    deadly = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if deadly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if deadly:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
