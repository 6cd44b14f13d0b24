"""Policies of `jax.checkpoint`: what they keep of a norm and of the products behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jln._core.derivatives import PRODUCT, STATISTICS


def kept_by(policy: Any) -> dict[str, bool]:
    """The things of a norm and of the products behind it, and whether a policy of `jax.checkpoint` keeps each."""

    def keeps(function: Callable[..., Any], ndim: int) -> bool:
        (equation,) = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((1,) * ndim, "float32")] * ndim).eqns
        avals = [v.aval for v in equation.invars]
        found = policy is not None and policy(equation.primitive, *avals, **equation.params)
        return found is True or ("Recompute" not in f"{type(found).__name__} {found}" and found is not False)

    return {
        "products": keeps(lambda a, b: jax.lax.dot(a, b), 2),
        "products of one kernel": keeps(lambda a: checkpoint_name(a, PRODUCT), 1),
        "row statistics": keeps(lambda a: checkpoint_name(a, STATISTICS), 1),
    }
