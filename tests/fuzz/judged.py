"""Judges what a program gave for a case by the truth."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from case import Case, grown, made, result_dtype
from tracked import Tracked, unit
from truth import evaluated, given_back, laid_out


def expected(case: Case) -> dict[str, tuple[np.ndarray, np.ndarray, str]]:
    """Return of each result its value, what a program may be off by, and its dtype."""
    operands, cotangents, directions = made(case)
    eps = unit(jnp.promote_types(case.operands["x"].dtype, "float32"))
    wide = np.longdouble if eps == unit("float64") else np.float64

    def tracked(name, array, a, direction=None):
        narrowed = eps if unit(a.dtype) < eps else 0  # by the rules, to the dtype of their arithmetic
        a, *more = (
            laid_out(case, name, np.broadcast_to(v.astype(wide), array.shape), array.axes)
            for v in (a, direction) if v is not None
        )  # fmt: skip
        tangent = Tracked(more[0], narrowed * np.abs(more[0]), eps) if more else None
        return Tracked(a, narrowed * np.abs(a), eps, tangent)

    given = {n: tracked(n, case.operands[n], a, directions.get(n)) for n, a in operands.items()}
    weights = {n: tracked(n, case.cotangents[n], a) for n, a in cotangents.items()}
    found = {}
    with np.errstate(all="ignore"):
        results, gradients = evaluated(case, given, weights)
        show = case.asks in ("value", "tangent") or (case.asks == "gradient" and case.values_too)
        for name, result in results.items() if show else ():
            shape, axes = _of_result(case, name)
            full = result.broadcast_to((*(level.size for level in case.levels), *result.shape[len(case.levels) :]))
            dtype = result_dtype(case, name)
            keep = {name: full.stored(dtype)} | (
                {f"{name}'": _or_zero(full).stored(dtype)} if case.asks == "tangent" else {}
            )
            for n, a in keep.items():
                found[n] = (
                    *(given_back(case, name, np.broadcast_to(v, full.shape), shape, axes) for v in (a.value, a.error)),
                    dtype,
                )
        for name in case.wanted if case.asks in ("gradient", "second") else ():
            array = case.operands[name]
            full = gradients.get(name, given[name] * 0)
            shown = {f"d{name}": full, f"d{name}'": _or_zero(full)}
            if case.asks == "gradient":
                del shown[f"d{name}'"]
            elif case.twice_reverse:
                del shown[f"d{name}"]
            for n, a in shown.items():
                found[n] = (*_summed(case, name, array, a), array.dtype)
    return found


def _or_zero(a: Tracked) -> Tracked:
    return a.tangent if a.tangent is not None else Tracked(np.zeros(()), 0, a.eps).broadcast_to(a.shape)


def _of_result(case: Case, name: str):
    """The shape of a result as the program gives it, and its levels' axes there."""
    return grown(case.result_shape(name), case.levels, lambda i, level, _: 0 if i < case.outer else level.out)


def _summed(case: Case, name: str, array, full: Tracked):
    """The gradient of an operand as the program gives it, from that for each example, and what it may be off by.

    Each example's is stored in the operand's dtype, and JAX adds these up in it, in any order. Of a sum of sums XLA may
    make one: where a cotangent is a broadcast, of as many equal numbers, whose roundings all err to one side.
    """
    lead = tuple(level.size for level in case.levels)
    full = full.broadcast_to((*lead, *full.shape[len(lead) :])).stored(array.dtype)
    # In front the axes of levels outside of the derivative, then of those inside of it that share the operand.
    is_shared = [i >= case.outer and axis is None for i, axis in enumerate(array.axes)]

    def place(i, level, shape):
        return 0 if i < case.outer or is_shared[i] else array.axes[i] + sum(is_shared[i + 1 :])

    shape, axes = grown(case.example_shape(name), case.levels, place)
    shared = sum(is_shared)
    value, error = (
        given_back(case, name, np.broadcast_to(a, full.shape), shape, axes) for a in (full.value, full.error)
    )
    kept = shape[case.outer + shared :] if case.outer else array.small
    small = (*shape[: case.outer], *[1] * shared, *kept)
    axes = tuple(i for i, (n, m) in enumerate(zip(shape, small, strict=True)) if n != m)
    terms = int(np.prod([shape[i] for i in axes], initial=1))
    if terms > 1:
        spread = [math.prod(a.shape) for a in case.cotangents.values() if a.small != a.shape]
        terms = max(terms, max(spread, default=0) // math.prod(small))
        rounding = terms * max(unit(array.dtype), full.eps) / (2 if unit(array.dtype) > full.eps else 1)
        error = (error + rounding * (np.abs(value) + error)).sum(axes, keepdims=True)
        value = value.sum(axes, keepdims=True)
        error = np.where(np.abs(value) + error < float(jnp.finfo(array.dtype).max), error, np.inf)
    return (a.squeeze(tuple(range(case.outer, case.outer + shared))) for a in (value, error))


def judge(case: Case, got: dict[str, np.ndarray]) -> tuple[float, list[str]]:
    """Return the largest error that a program has, as a part of what is allowed, and what is wrong, in words."""
    true, wrong, worst = expected(case), [], 0.0
    if got.keys() != true.keys():
        return np.inf, [f"results {sorted(got)} instead of {sorted(true)}"]
    for name, (value, allowed, dtype) in true.items():
        a = got[name]
        if str(a.dtype) != dtype or a.shape != value.shape:
            wrong.append(f"{name} is {a.dtype} {a.shape} instead of {dtype} {value.shape}")
            worst = np.inf
            continue
        if not a.size:
            continue
        a = a.astype(value.dtype)
        allowed = np.where(np.isnan(allowed) | np.isnan(value), np.inf, allowed)
        with np.errstate(all="ignore"):
            error = np.nan_to_num(np.abs(a - value), nan=np.inf, posinf=np.inf)
            share = np.where(error == 0, 0, np.where(np.isinf(allowed), 0, error / allowed))
        at = np.unravel_index(np.argmax(share), share.shape)
        worst = max(worst, float(share[at]))
        if not share[at] <= 1:
            wrong.append(
                f"{name}{[int(i) for i in at]} is {a[at]:.9g} instead of {value[at]:.9g}: off by {error[at]:.2e}, "
                f"allowed {allowed[at]:.2e}; {np.mean(share > 1):.1%} of the elements are off"
            )
    return worst, wrong
