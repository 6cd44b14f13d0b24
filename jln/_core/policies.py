"""Policies of `jax.checkpoint`: what they keep of a norm and of the products behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jln._core.derivatives import PRODUCT, STATISTICS


def kept_by(policy: Any) -> dict[str, bool]:
    """The things of a norm and of the products behind it, and whether a policy of `jax.checkpoint` keeps each."""
    return {
        "products": _keeps(policy, lambda a, b: jax.lax.dot(a, b), 2),
        "products of one kernel": _keeps(policy, lambda a: checkpoint_name(a, PRODUCT), 1),
        "row statistics": _keeps(policy, lambda a: checkpoint_name(a, STATISTICS), 1),
    }


def keeps_products_alone(policy: Any) -> bool:
    """True where a policy of `jax.checkpoint` keeps products, and not what is made elementwise, as a sum."""
    return kept_by(policy)["products"] and not _keeps(policy, lambda a: jax.lax.add(a, a), 1)


def _keeps(policy: Any, function: Callable[..., Any], ndim: int) -> bool:
    """True where the policy keeps what the one equation of a function makes of arrays with that many axes."""
    arguments = [jax.ShapeDtypeStruct((1,) * ndim, "float32")] * ndim
    (equation,) = jax.make_jaxpr(function)(*arguments).eqns
    return keeps(policy, equation)


def keeps(policy: Any, equation: Any) -> bool:
    """True where the policy keeps what the equation makes."""
    avals = [v.aval for v in equation.invars]
    found = policy is not None and policy(equation.primitive, *avals, **equation.params)
    return found is True or ("Recompute" not in f"{type(found).__name__} {found}" and found is not False)
