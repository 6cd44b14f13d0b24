"""Which norm an array is the result of, for the Linear that reads this very array.

The array is an array, and whoever reads it gets its numbers. That a Linear reads it is known by its identity: nothing
stands between the two. What a cast, a dropout or a `jax.jit` around either of them hands on is another array, of which
nothing is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jln._modules.norms import NormCall, Prepared


class _Known(NamedTuple):
    """result: the array. call: the norm's. made_of: x, scale and offset, x with as many more axes in front as `mapped`
    says, over which `jax.vmap` has mapped the call. All are functions that return what they hold, or None.
    """

    result: Callable[[], Any]
    call: NormCall
    made_of: tuple[Callable[[], Any], ...]
    mapped: int


# By the identity of a norm's result, for as long as that lives.
_known: dict[int, _Known] = {}


def remember(z: Any, norm: Prepared) -> None:
    """`z` is the result of `norm`; where this happens under `jax.vmap`, also as it is behind it."""
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
    """The norm of which `z` is the result, if there is one that is known."""
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
    """A trace that stages a program keeps what it reads as long as what it makes; and is kept, if it ends in an error,
    by whoever holds one of its arrays.
    """
    return weakref.ref(a) if hasattr(getattr(a, "_trace", None), "frame") else lambda: a


def _is_deleted(a: Any) -> bool:
    """Donated to a program since, for one."""
    return isinstance(a, jax.Array) and not isinstance(a, Tracer) and a.is_deleted()


def _is_mapped(a: Any) -> bool:
    """By the innermost `jax.vmap` that knows it, over its first axis."""
    return isinstance(a, Tracer) and getattr(a, "batch_dim", None) == 0
