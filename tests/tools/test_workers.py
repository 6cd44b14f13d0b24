"""Processes that do pieces of work: what one that dies, hangs or breaks its GPU's context loses."""

import os
import time

import jax
import pytest

pytest.importorskip("typer")

from workers import Last, OutOfTime, Worker, WorkError, work_side_by_side


def do(piece):
    """Return the piece and the process, or do what the piece says."""
    if piece == "die":
        os._exit(7)
    if piece == "hang":
        time.sleep(600)
    if piece == "raise":
        raise ValueError("on two\nlines")
    if piece == "break":
        raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    return Last((piece, os.getpid())) if piece == "last" else (piece, os.getpid())


def test_a_worker_lives_until_something_ends_it():
    worker = Worker()
    try:
        _, first = worker.call(do, "a")
        with pytest.raises(WorkError, match=r"^ValueError: on two lines$"):
            worker.call(do, "raise")
        assert worker.call(do, "b") == ("b", first) and first != os.getpid()
        for ends, error in (
            ("die", "its process died with exit status 7"),
            ("hang", "out of time after 1 s"),
            ("break", "JaxRuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ):
            with pytest.raises(WorkError, match=error) as caught:
                worker.call(do, ends, seconds=1.0 if ends == "hang" else 60)
            assert (caught.type is OutOfTime) == (ends == "hang")
            _, now = worker.call(do, "c")
            assert now != first, ends
            first = now
        assert worker.call(do, "last") == ("last", first) and worker.call(do, "d")[1] != first
    finally:
        worker.end()


def test_what_ends_one_process_or_takes_too_long_loses_one_piece():
    pieces = ["a", "die", "b", "break", "hang"]
    found = dict(work_side_by_side(do, pieces, 2, limit=12))
    assert found.keys() == set(pieces) and isinstance(found["hang"], OutOfTime)
    assert {piece for piece, outcome in found.items() if isinstance(outcome, WorkError)} == {"die", "break", "hang"}


def test_a_piece_that_the_end_of_the_time_cuts_off_is_left_out():
    started = time.monotonic()
    assert dict(work_side_by_side(do, ["hang", "a"], 1, limit=60, seconds=3)) == {}
    assert time.monotonic() - started < 30
