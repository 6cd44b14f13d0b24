"""Data, truth and tolerances that the tests share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jln

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Operator:
    """One of the public functions: which of the family's terms it has."""

    name: str
    subtract_mean: bool
    adds: bool

    def __call__(self, x, residual, scale, offset, *, module=jln, **options):
        """-> (y, total); `total` is None where nothing is added."""
        operands = [x]
        if self.adds:
            operands.append(residual)
        operands.append(scale)
        if self.subtract_mean:
            operands.append(offset)
        result = getattr(module, self.name)(*operands, **options)
        return result if self.adds else (result, None)


OPERATORS = {
    o.name: o
    for o in (
        Operator("layer_norm", subtract_mean=True, adds=False),
        Operator("rms_norm", subtract_mean=False, adds=False),
        Operator("add_layer_norm", subtract_mean=True, adds=True),
        Operator("add_rms_norm", subtract_mean=False, adds=True),
    )
}


def normal(seed: int, shape, dtype, mean: float = 0.0) -> jax.Array:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) + mean
    return jnp.asarray(values).astype(dtype)


def arguments(operator: Operator, shape, dtype, *, parameter_dtype=None, axis=-1, mean=0.0):
    """(x, residual, scale, offset), absent ones None; every row of x has the given mean and spread 1."""
    axes = (axis,) if isinstance(axis, int) else axis
    normalised = tuple(shape[a] for a in axes)
    parameter_dtype = parameter_dtype or dtype
    return (
        normal(0, shape, dtype, mean),
        normal(1, shape, dtype) if operator.adds else None,
        normal(2, normalised, parameter_dtype, 1.0),
        normal(3, normalised, parameter_dtype) if operator.subtract_mean else None,
    )


def cotangents(outputs):
    """Of one shape and yet different: taken for each other they would be noticed."""
    leaves, tree = jax.tree.flatten(outputs)
    return jax.tree.unflatten(tree, [normal(6 + i, a.shape, a.dtype) for i, a in enumerate(leaves)])


def value_and_gradients(function, operands, cotangent=None):
    """The outputs and, under a random cotangent, every operand's gradient: a dict from name to array."""

    @jax.jit
    def run(operands, cotangent):
        outputs, pullback = jax.vjp(function, *operands)
        return outputs, pullback(cotangent)

    if cotangent is None:
        cotangent = cotangents(jax.eval_shape(function, *operands))
    (y, total), gradients = run(operands, cotangent)
    named = dict(zip(("y", "total", "dx", "dresidual", "dscale", "doffset"), (y, total, *gradients), strict=True))
    return {name: np.asarray(a) for name, a in named.items() if a is not None}


def truth(operator: Operator, operands, cotangent, total=None, *, epsilon=EPSILON):
    """The same in float64 (longdouble for float64 operands), in NumPy, in blocks of rows, and what one rounding of each
    intermediate may change: `(values, roundings)`, roundings a number a row (a column for the parameters).

    Rows are the last axis. `total` is the rounded sum that was normalised.
    """
    x, residual, scale, offset = (None if a is None else np.asarray(a) for a in operands)
    dy, dtotal = (None if a is None else np.asarray(a) for a in cotangent)
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    eps = float(jnp.finfo(jnp.promote_types(x.dtype, jnp.float32)).eps)
    s = 1 if scale is None else scale.astype(wide)
    b = 0 if offset is None else offset.astype(wide)
    values = {"y": [], "dx": [], "total": []}
    roundings = {"y": [], "dx": [], "total": []}
    sums = {"dscale": 0, "doffset": 0}
    squares = {"dscale": 0, "doffset": 0}
    block = max(1, 2**20 // x.shape[-1])
    for first in range(0, x.shape[0], block):
        rows = slice(first, first + block)
        v = x[rows].astype(wide)
        if residual is not None:
            v = v + residual[rows].astype(wide)
            values["total"].append(v)
            roundings["total"].append(eps * _largest(v))
            v = total[rows].astype(wide)
        rounding = eps * _largest(v)  # of the mean, and so of x - mean
        if operator.subtract_mean:
            v = v - v.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + wide(epsilon))
        x_hat = v * rstd
        rounding = rounding * rstd + eps * _largest(x_hat)
        d = dy[rows].astype(wide)
        g = d * s
        c1 = g.mean(-1, keepdims=True) if operator.subtract_mean else 0
        c2 = (g * x_hat).mean(-1, keepdims=True)
        dx = rstd * (g - c1 - x_hat * c2)
        # Of a constant row x_hat is 0 but for rounding, which then counts squared.
        dx_rounding = rstd * (eps * _largest(g) + rounding * (np.abs(c2) + _largest(g) * (_largest(x_hat) + rounding)))
        if dtotal is not None:
            dx = dx + dtotal[rows].astype(wide)
        values["y"].append(x_hat * s + b)
        roundings["y"].append(rounding * np.max(np.abs(s)) + eps * _largest(values["y"][-1]))
        values["dx"].append(dx)
        roundings["dx"].append(dx_rounding)
        sums["dscale"] += (d * x_hat).sum(0)
        sums["doffset"] += d.sum(0)
        # Independent errors: each term's own, and that of each addition, relative to a partial sum as large as
        # sqrt(rows) terms.
        squares["dscale"] += ((d * rounding) ** 2 + len(x) * (eps * d * x_hat) ** 2).sum(0)
        squares["doffset"] += (len(x) * (eps * d) ** 2).sum(0)
    values, roundings = ({k: np.concatenate(a) for k, a in d.items() if a} for d in (values, roundings))
    values |= sums
    roundings |= {k: np.sqrt(a) for k, a in squares.items()}
    if residual is not None:
        values["dresidual"], roundings["dresidual"] = values["dx"], roundings["dx"]
    return values, roundings


def _largest(a):
    return np.max(np.abs(a), -1, keepdims=True)


def errors(got, plain, true):
    """Each result's error and what is allowed of it, by element: at most twice that of plain jnp in the same dtype,
    plus one rounding. Yields (name, error, allowed, plain jnp's largest error).
    """
    values, roundings = true
    assert got.keys() == plain.keys()
    for name, a in got.items():
        t = values[name]
        assert a.dtype == plain[name].dtype and a.shape == plain[name].shape == t.shape, name
        last = float(jnp.finfo(a.dtype).eps) * np.abs(t)  # the rounding to the result's own dtype
        plain_error = np.max(np.abs(plain[name].astype(t.dtype) - t), initial=0.0)
        yield name, np.abs(a.astype(t.dtype) - t), 2 * plain_error + roundings[name] + last, plain_error


def assert_accurate(got, plain, true):
    """Raise where one of `errors` is more than is allowed."""
    for name, error, allowed, plain_error in errors(got, plain, true):
        excess = error - allowed
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        assert excess[worst] <= 0, (
            f"{name}{list(map(int, worst))}: {got[name][worst]} for {true[0][name][worst]}, an error of "
            f"{float(error[worst]):.3e}, {float(excess[worst]):.3e} too much; plain jnp's largest is "
            f"{float(plain_error):.3e}"
        )


def shares(got, plain, true):
    """From each result's name to its largest error as a part of what is allowed; infinite where one is not a number."""
    return {
        name: float(np.max(np.where(error == 0, 0, np.nan_to_num(error / allowed, nan=np.inf)), initial=0.0))
        for name, error, allowed, _ in errors(got, plain, true)
    }


@dataclasses.dataclass(frozen=True)
class LinearOperator:
    """A norm and the Linear behind it."""

    name: str
    subtract_mean: bool

    def __call__(self, x, scale, offset, kernel, bias, *, module=jln, **options):
        operands = (x, scale, offset, kernel, bias) if self.subtract_mean else (x, scale, kernel, bias)
        return getattr(module, self.name)(*operands, **options)


LINEAR_OPERATORS = {
    o.name: o
    for o in (
        LinearOperator("layer_norm_linear", subtract_mean=True),
        LinearOperator("rms_norm_linear", subtract_mean=False),
    )
}


def linear_arguments(operator: LinearOperator, rows, h, features, dtype, *, parameter_dtype=None):
    """(x, scale, offset, kernel, bias); y is of the size of its bias."""
    parameter_dtype = parameter_dtype or dtype
    return (
        normal(0, (*rows, h), dtype),
        normal(1, (h,), parameter_dtype, 1.0),
        normal(2, (h,), parameter_dtype) if operator.subtract_mean else None,
        (normal(3, (h, *features), "float64") / np.sqrt(h)).astype(parameter_dtype),
        normal(4, features, parameter_dtype),
    )


LINEAR_RESULTS = ("y", "dx", "dscale", "doffset", "dkernel", "dbias")


def linear_value_and_gradients(function, operands, dy):
    """y and every operand's gradient under `dy`: a dict from name to array."""

    @jax.jit
    def run(operands, dy):
        y, pullback = jax.vjp(function, *operands)
        return y, *pullback(dy)

    return {k: np.asarray(a) for k, a in zip(LINEAR_RESULTS, run(operands, dy), strict=True) if a is not None}


def linear_truth(operator: LinearOperator, operands, dy, *, zero_centered_scale=False, epsilon=EPSILON):
    """As `truth`, for operands of x [M, H] and kernel [H, N]."""
    x, scale, offset, kernel, bias = (None if a is None else np.asarray(a) for a in operands)
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    eps = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
    v, k, d = x.astype(wide), kernel.astype(wide), np.asarray(dy).astype(wide)
    s, b, c = (default if a is None else a.astype(wide) for a, default in ((scale, 1), (offset, 0), (bias, 0)))
    s = s + zero_centered_scale
    rounding = eps * _largest(v)
    if operator.subtract_mean:
        v = v - v.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + wide(epsilon))
    x_hat = v * rstd
    rounding = rounding * rstd + eps * _largest(x_hat)
    z = x_hat * s + b
    z_rounding = rounding * np.max(np.abs(s)) + eps * _largest(z)
    if dtype.itemsize < 4:  # an operand of the product
        z_rounding = z_rounding + float(jnp.finfo(dtype).eps) * np.abs(z)
    dz = d @ k.T
    g = dz * s
    c1 = g.mean(-1, keepdims=True) if operator.subtract_mean else 0
    c2 = (g * x_hat).mean(-1, keepdims=True)
    values = {
        "y": z @ k + c,
        "dx": rstd * (g - c1 - x_hat * c2),
        "dscale": (dz * x_hat).sum(0),
        "doffset": dz.sum(0),
        "dkernel": z.T @ d,
        "dbias": d.sum(0),
    }
    # Independent errors: each factor's own, and that of each addition, relative to a partial sum as large as the square
    # root of the number of terms.
    m, h, n = len(x), *k.shape
    z_rounding, rounding = (np.broadcast_to(a, z.shape) for a in (z_rounding, rounding))
    dz_square = n * eps**2 * (d**2 @ (k**2).T)
    squares = {
        "y": z_rounding**2 @ k**2 + h * eps**2 * (z**2 @ k**2) + (eps * values["y"]) ** 2 + (eps * c) ** 2,
        "dscale": (dz_square * x_hat**2 + (dz * rounding) ** 2 + m * (eps * dz * x_hat) ** 2).sum(0),
        "doffset": (dz_square + m * (eps * dz) ** 2).sum(0),
        "dkernel": (z_rounding**2).T @ d**2 + m * eps**2 * ((z**2).T @ d**2),
        "dbias": m * eps**2 * (d**2).sum(0),
    }
    roundings = {name: np.sqrt(a) for name, a in squares.items()}
    g_rounding = np.sqrt(dz_square) * np.abs(s) + eps * _largest(g)
    roundings["dx"] = rstd * (
        _largest(g_rounding) + rounding * (np.abs(c2) + _largest(g) * (_largest(x_hat) + rounding))
    )
    return values, roundings
