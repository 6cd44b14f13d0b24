"""The operators once more: what a drawn case gives in exact arithmetic, and how far a program may be from it.

Every array has an axis for each of the case's levels, one for each axis of rows and the normalised one, with 1 where it
is shared. They are NumPy's, and nothing here knows `jln.reference` or the rules, but for which of them a case is by.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from case import LARGEST, Case, may_be_plain_jnp
from quantised import OF_COTANGENT, OF_KERNEL, in_eight_bits, largest, quantised
from tracked import Tracked, total, unit


def evaluated(case: Case, given: dict, cotangents: dict) -> tuple[dict, dict]:
    """The results and, where there are cotangents, the gradients, as (results, gradients), by name.

    given, cotangents: Tracked arrays. A gradient has the sizes of all levels: what examples share is not added up.
    """
    o = given.get
    form, levels = case.form, len(case.levels)
    lead = tuple(level.size for level in case.levels)
    dtypes = {name: operand.dtype for name, operand in case.operands.items()}
    x, residual = given["x"], o("residual")
    w = given.get("gate", case.number)
    of_rows = [a.shape[levels:] for n, a in given.items() if not n.startswith(("kernel", "bias"))]
    full = (*lead, *np.broadcast_shapes(*of_rows))
    results, gradients = {}, {}

    def of(name):
        a = o(name)
        return a + 1 if a is not None and case.static.get("zero_centered_scale") else a

    def keep(name, gradient):
        if name in given:
            a = given[name]
            gradients[name] = gradient.sum_to((*lead, *a.shape[levels:]))

    def scaled(a, scale):
        return a if scale is None else a * scale

    t, s = of("x_scale"), of("scale")
    branch = x
    if form.both_sides:
        x_hat_in_front, x_rstd = normalised(x, x, case.epsilon)
        branch = scaled(x_hat_in_front, t)
    parts = [branch] if o("x_bias") is None else [branch, o("x_bias")]
    gate_first = "norm_before_gate" in dict(form.options)
    u, slope, of_slope = o("z").silu() if o("z") is not None else (None, None, None)

    def by_slope(a):
        """Return a * slope, which a program may multiply out: what `a` is off by counts in each term of the slope."""
        made = (a * slope).off_by(a.error * of_slope)
        if a.tangent is not None:
            made.tangent = made.tangent.off_by(a.tangent.error * of_slope)
        return made

    v, total_dtype = x, dtypes["x"]
    if form.adds:
        total_dtype = jnp.promote_types(dtypes["x"], dtypes["residual"])
        v = results["total"] = (total(scaled(a, w) for a in parts) + residual).rounded(total_dtype)
    elif gate_first:
        v = x * u
    x_hat, rstd = normalised(v, v - v.mean() if form.centres else v, case.epsilon)
    z = scaled(x_hat, s)
    size = z.magnitude  # of the terms, where they cancel
    if o("offset") is not None:
        z = z + o("offset")
        size = size + o("offset").magnitude

    # Behind the norm, and its cotangent dz, which goes straight through eight bits.
    dy = {n: c for n, c in cotangents.items() if n != "total"}
    dz = dy.get("y")
    if dz is not None and case.quantize is not None and not form.is_linear:
        dz = dz.stored(jnp.promote_types(dtypes["x"], dtypes["residual"] if form.adds_behind else dtypes["x"]))
    if form.is_linear:
        z, dz = _products(case, given, z, size, x_hat, dy, results, keep)
    elif form.adds_behind:
        results["y"] = z + residual
        if dz is not None:
            keep("residual", dz)
    elif u is not None and not gate_first:
        results["y"] = z * u
        if dz is not None:
            keep("z", by_slope(dz * z))
            dz = dz * u
    else:
        results["y"] = z

    if case.quantize is not None and not form.is_linear:
        results |= quantised(results["y"], case.quantize, levels)
    # In front of it, and its cotangent d.
    d = None
    if dz is not None:
        keep("offset", dz)
        keep("scale", dz * x_hat)
        g = scaled(dz, s).broadcast_to(full)
        d = g - x_hat * (g * x_hat).mean()
        if form.centres:
            d = d - g.mean()
        d = d * rstd
    of_total = cotangents.get("total")
    is_plain = form.adds and may_be_plain_jnp(case)
    if d is not None and is_plain:
        d = d.stored(total_dtype)
    if of_total is not None and _share_rows(case):  # JAX adds up the examples', one after the other
        of_total = of_total.stored(total_dtype, 0.5 * math.prod(lead))
    d = total((d, of_total))
    if d is None:
        return results, gradients
    if form.both_sides or is_plain:
        d = d.stored(total_dtype)
    if form.adds:
        keep("residual", d)
        keep("gate", total(d * part for part in parts))  # each by itself, as derivatives of the rules add them up
    if form.both_sides:
        of_branch = scaled(d, w)
        if w is not None and total_dtype == jnp.bfloat16:  # float16 is too narrow for a small gate, and not written
            of_branch = of_branch.stored(total_dtype)
        keep("x_scale", of_branch * x_hat_in_front)
        of_u = scaled(of_branch, t).broadcast_to(full)
        keep("x", (of_u - x_hat_in_front * (of_u * x_hat_in_front).mean()) * x_rstd)
    elif gate_first:
        keep("x", d * u)
        keep("z", by_slope(d * x))
    else:
        dx = scaled(d, w)
        keep("x", dx)
        keep("x_bias", dx)
    return results, gradients


def _share_rows(case: Case) -> bool:
    """Return whether examples share all but scale and offset, and so the sum that is normalised."""
    return any(
        level.by == "vmap" and {n for n, a in case.operands.items() if a.axes[i] is not None} <= {"scale", "offset"}
        for i, level in enumerate(case.levels)
        if i >= case.outer
    )


def normalised(v: Tracked, centred: Tracked, epsilon: float) -> tuple[Tracked, Tracked]:
    """Return x_hat of rows v, and rstd.

    The tangent of rstd is that of the rules, which multiply x_hat with the tangent of v as it is. With the centred one
    it would be the same number, but less sensitive to what x_hat is off by.
    """
    a = centred.without_tangent
    rstd = ((a * a).mean() + epsilon).rsqrt()
    if v.tangent is not None:
        rstd.tangent = -(a * rstd.without_tangent * v.tangent).mean() * rstd.without_tangent * rstd.without_tangent
    return centred * rstd, rstd


def _products(case, given, z, size, x_hat, dy, results, keep):
    """The results of the Linears, and their part of the gradients. Returns z and the cotangent of it."""
    levels = len(case.levels)
    rows = z.shape[levels:-1]

    def flat(a):
        return a.reshape(*a.shape[:levels], -1, a.shape[-1])

    dz = None
    for i in range(case.several or 1):
        at = f"[{i}]" if case.several else ""
        kernel, bias = given[f"kernel{at}"], given.get(f"bias{at}")
        dtype = jnp.promote_types(case.operands["x"].dtype, case.operands[f"kernel{at}"].dtype)
        eps, narrow = z.eps, unit(dtype) / 2 if unit(dtype) > z.eps else 0
        (h, n), m = kernel.shape[levels:], math.prod(rows)
        # Rounded to the product's dtype, by kernels before the row's statistics are known: relative to those of some of
        # its columns, and without the offset.
        magnitude = size
        if case.implementation == "triton":
            spread = np.max(x_hat.magnitude, -1, keepdims=True)
            ones = bool(case.static.get("zero_centered_scale"))
            magnitude = size + spread * (1 if given.get("scale") is None else (given["scale"] + ones).magnitude)
        operand = z.off_by((narrow + eps) * magnitude)
        k = kernel.stored(dtype)
        if case.quantize is not None:
            scale = getattr(case.quantize, "scale", None)
            if i == 0 and scale is not None:
                results[LARGEST] = largest(z, levels)
            operand, k = in_eight_bits(operand, case.quantize), in_eight_bits(k, OF_KERNEL)
        a = flat(operand.broadcast_to((*operand.shape[:levels], *rows, h)))
        a_size = flat(Tracked(np.broadcast_to(magnitude, (*operand.shape[:levels], *rows, h)), 0, eps)).value
        y = (a @ k).off_by(h * eps * (a_size @ k.magnitude))
        y = y.reshape(*y.shape[:-2], *rows, n)
        if bias is not None:
            y = y.off_by(narrow * y.magnitude) + bias
        results[f"y{at}"] = y
        if (d := dy.get(f"y{at}")) is None:
            continue
        keep(f"bias{at}", d)
        if case.quantize is not None:
            d = in_eight_bits(d, OF_COTANGENT[type(case.quantize)])
        d = flat(d.broadcast_to((*d.shape[:levels], *rows, n)))
        dk = (a.swapped() @ d).off_by(m * eps * (a_size.swapaxes(-1, -2) @ d.magnitude))
        keep(f"kernel{at}", dk)
        # The sums over rows and over features, in either order.
        back = d @ k.swapped()
        back = back.off_by((m + n) * eps * (d.magnitude @ k.magnitude.swapaxes(-1, -2)))
        kept = dtype if dtype == jnp.bfloat16 or may_be_plain_jnp(case) else "float64"
        back = back.stored(kept).reshape(*back.shape[:-2], *rows, h)
        dz = back if dz is None else (dz + back).stored(kept)
    return z, dz


# A case's arrays as these, and back.


def laid_out(case: Case, name: str, a: np.ndarray, axes) -> np.ndarray:
    """An operand, a result or their like with the axes that this module has. axes: where its levels' axes are."""
    for level, axis in enumerate(axes):
        a = np.expand_dims(a, level) if axis is None else np.moveaxis(a, level + axis, level)
    levels, lead = len(case.levels), a.shape[: len(case.levels)]
    ndim, normalised = len(case.shape), sorted(case.axes)
    rows = [1] * (ndim - len(normalised))
    kind = case.kind(name)
    if kind == "kernel":
        return a.reshape(*a.shape[: levels + 1], -1)
    if kind == "bias":
        return a.reshape(*lead, *rows, -1)
    if kind == "product":
        return a.reshape(*a.shape[: levels + len(rows)], -1)
    if kind == "number":
        return a.reshape(*lead, *rows, 1)
    if kind == "H":
        order = [case.axes.index(i) for i in normalised]
        return a.transpose(*range(levels), *(levels + i for i in order)).reshape(*lead, *rows, -1)
    last = range(a.ndim - len(normalised), a.ndim)
    a = np.moveaxis(a, [levels + i for i in normalised], last)
    return a.reshape(*a.shape[: levels + len(rows)], -1)


def given_back(case: Case, name: str, made: np.ndarray, shape, axes) -> np.ndarray:
    """The inverse of `laid_out`, for an array of that shape."""
    places = laid_out(case, name, np.arange(math.prod(shape)).reshape(shape), axes)
    result = np.empty(math.prod(shape), made.dtype)
    result[places.ravel()] = np.broadcast_to(made, places.shape).ravel()
    return result.reshape(shape)
