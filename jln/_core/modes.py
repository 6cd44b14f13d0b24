"""Modes of JAX in which the package's own functions are traced, whatever the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax._src import config


@contextlib.contextmanager
def own_modes() -> Iterator[None]:
    """Trace in JAX's standard dtype promotion, without `jax_error_checking_behavior_nan` and its like.

    Every dtype is chosen on purpose. What JAX notes of errors is an array of the program around, which a function that
    is traced by itself cannot write to: a NaN is noted where the program uses the results.
    """
    with (
        jax.numpy_dtype_promotion("standard"),
        config.error_checking_behavior_nan("ignore"),
        config.error_checking_behavior_divide("ignore"),
        config.error_checking_behavior_oob("ignore"),
    ):
        yield
