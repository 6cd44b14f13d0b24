"""A record of which norm an array is the result of, for the Linear that reads this very array.

The result of a norm is an array as any other, and whoever reads it gets its numbers. A Linear knows it by its identity:
nothing stands between the norm and the Linear. A cast, a dropout or a `jax.jit` around either of them hands on another
array, of which nothing is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jln._modules.norms import NormCall, Prepared


class _Known(NamedTuple):
    """The origin of one array.

    result: a function that returns the array, or None once it is gone.
    call: the norm's static arguments.
    made_of: functions that return x, scale and offset, or None once these are gone.
    mapped: how many axes x has in front, over which `jax.vmap` has mapped the call.
    """

    result: Callable[[], Any]
    call: NormCall
    made_of: tuple[Callable[[], Any], ...]
    mapped: int


# The origins of norms' results by identity, each for as long as its array lives.
_known: dict[int, _Known] = {}


def remember(z: Any, norm: Prepared) -> None:
    """Note that `z` is the result of `norm`; under `jax.vmap` also for the array behind the map."""
    x: Any = norm.x
    parameters = norm.scale, norm.offset
    mapped = 0
    while True:
        place = id(z)
        result = weakref.ref(z, lambda _, place=place: _known.pop(place, None))
        _known[place] = _Known(result, norm.call, tuple(map(_held, (x, *parameters))), mapped)
        if not (_is_mapped(z) and _is_mapped(x) and z._trace is x._trace):
            break
        if any(getattr(a, "_trace", None) is z._trace for a in parameters):
            break
        z, x, mapped = z.val, x.val, mapped + 1


def of(z: Any) -> Prepared | None:
    """The norm whose result `z` is known to be; None where none is known."""
    inside: list[Any] = []
    while (known := _known.get(id(z))) is None or known.result() is not z:
        if not _is_mapped(z):
            return None
        inside.append(z)
        z = z.val
    if len(inside) > known.mapped:
        return None
    if any(isinstance(held, weakref.ref) and held() is None for held in known.made_of):
        return None
    x, scale, offset = (held() for held in known.made_of)
    if any(_is_deleted(a) for a in (x, scale, offset)):
        return None
    for tracer in reversed(inside):
        x = type(tracer)(tracer._trace, x, 0)
    return Prepared(x, scale, offset, known.call).mapped(known.mapped - len(inside))


def _held(a: Any) -> Callable[[], Any]:
    """A function that returns `a`; of a traced program's array it keeps only a weak reference, and may return None.

    A trace that stages a program keeps its arrays as long as the results made of them. A strong reference would keep a
    trace that ends in an error.
    """
    return weakref.ref(a) if hasattr(getattr(a, "_trace", None), "frame") else lambda: a


def _is_deleted(a: Any) -> bool:
    """True for an array that is gone, as one that was donated to a program."""
    return isinstance(a, jax.Array) and not isinstance(a, Tracer) and a.is_deleted()


def _is_mapped(a: Any) -> bool:
    """True for a tracer of the innermost `jax.vmap` around it, mapped over its first axis."""
    return isinstance(a, Tracer) and getattr(a, "batch_dim", None) == 0
