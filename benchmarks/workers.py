"""Processes that do pieces of work one after another, each with a GPU context of its own.

A kernel that reads where it may not takes its process' context with it, and every later program there fails. In a
process of its own it loses one piece of work.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax

from rows import one_line

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class WorkError(Exception):
    """The error of a piece of work: what it raised, or how its process ended."""


class OutOfTime(WorkError):
    """The error of a piece of work that took too long."""


class Last(NamedTuple):
    """A result behind which the process is to end, as when an error may have broken its GPU's context."""

    result: Any


class Worker:
    """A process that calls functions, begun at the first call and again after one that ended it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """Return what a module's function returns in the process.

        Raises WorkError where the function raises or its process dies, OutOfTime after so many seconds.
        """
        if self._process is None or not self._process.is_alive():
            spawn = multiprocessing.get_context("spawn")  # a fork would share what JAX has begun
            self._connection, theirs = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._connection.send((function, arguments))
            if not self._connection.poll(seconds):
                self.end()
                raise OutOfTime(f"out of time after {seconds:.0f} s")
            ok, result, is_last = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise WorkError(f"its process died with exit status {self._process.exitcode}") from None
        if is_last:
            self.end()
        if not ok:
            raise WorkError(result)
        return result

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def _serve(connection: Connection) -> None:
    if sys.platform == "linux":  # whoever ends the process that asked, this one ends with it, whatever it does
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, arguments = connection.recv()
            try:
                ok, result = True, function(*arguments)
                is_last = isinstance(result, Last)
            except Exception as error:
                ok, result = False, one_line(error)
                is_last = isinstance(error, jax.errors.JaxRuntimeError)
            connection.send((ok, result.result if isinstance(result, Last) else result, is_last))


def work_side_by_side(
    function: Callable[[Any], Any], pieces: Sequence[Any], processes: int, limit: float, seconds: float | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield each piece with what the function returns for it, or a WorkError, in the order in which they end.

    limit: seconds for one piece. seconds: for all; what has not begun then is left out, and what has is cut off.
    """
    end = float("inf") if seconds is None else time.monotonic() + seconds
    workers = [Worker() for _ in range(min(processes, len(pieces)))]
    idle = list(workers)

    def work(piece: Any) -> tuple[Any, Any] | None:
        left = end - time.monotonic()
        if left <= 0:
            return None
        worker = idle.pop()
        try:
            return piece, worker.call(function, piece, seconds=min(limit, left))
        except WorkError as error:
            return None if isinstance(error, OutOfTime) and left < limit else (piece, error)
        finally:
            idle.append(worker)

    with ThreadPoolExecutor(len(workers) or 1) as threads:
        try:
            for job in as_completed([threads.submit(work, piece) for piece in pieces]):
                if (done := job.result()) is not None:
                    yield done
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.end()
