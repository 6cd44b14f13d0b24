"""Counts of a function as `jln.fuse` made it: the operators found, and the bytes held for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import jln


class Found(NamedTuple):
    """Counts of what `jln.explain` lists of a fused function; the body of a scan counts once.

    norms: those that operators compute. sums: with a norm in one operator. linears: norms that are one operator with
      the Linears behind. left: norms that stay as they are.
    """

    norms: int
    sums: int
    linears: int
    left: int


def found(fused: Callable[..., Any], *args: Any) -> Found:
    routes = jln.explain(fused, *args)
    names = [route.layer for route in routes if route.path != "plain"]
    return Found(
        norms=sum(name.count("norm") for name in names),
        sums=sum("residual" in route.why.split(";")[0] for route in routes if route.path != "plain"),
        linears=sum(name.endswith("_linear") for name in names),
        left=len(routes) - len(names),
    )


def held(function: Callable[[Any, Any], Any], parameters: Any, x: Any) -> int:
    """The bytes that are kept between forward and backward, beside the parameters and x."""

    def pulling(parameters: Any, x: Any) -> Any:
        return jax.vjp(function, parameters, x)[1]

    program = jax.make_jaxpr(pulling)(parameters, x).jaxpr
    given = {*program.invars}
    kept = dict.fromkeys(v for v in program.outvars if not isinstance(v, Literal) and v not in given)
    return sum(v.aval.size * jnp.dtype(v.aval.dtype).itemsize for v in kept)
