"""Data, truth and tolerances that the tests share."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np

import jln
from jln import _catalogue
from jln._catalogue import EPSILON


@dataclasses.dataclass(frozen=True)
class Operator:
    """A public function as the tests call it: with all arguments of its kind in order, absent ones None.

    Those of the norms take a residual, which may be None.
    """

    entry: _catalogue.Operator

    name = property(lambda self: self.entry.name)
    adds = property(lambda self: self.entry.adds)
    subtract_mean = property(lambda self: self.entry.centres)

    @property
    def kind(self):
        if self.entry.in_front is not None or self.entry.is_gated:
            return self.entry
        is_linear = self.entry.is_linear
        fullest = _catalogue.fullest(is_linear=is_linear, adds=self.adds or not is_linear)
        return fullest.including(*self.entry.given_extras)

    @property
    def results(self):
        """The names of the operator's results, and of its operands' gradients."""
        return (*(a.name for a in self.kind.results), *(f"d{name}" for name in self.kind.names))

    def __call__(self, *operands, module=jln, **options):
        """Call the operator: y of a Linear or of a gated norm, or (y, total).

        A norm returns (y, total), where `total` is None if nothing is added.
        """
        named = dict(zip(self.kind.names, operands, strict=True))
        static = dict(self.entry.options) | options
        result = getattr(module, self.name)(**{name: named[name] for name in self.entry.names}, **static)
        return result if self.entry.is_linear or self.adds or self.entry.is_gated else (result, None)


OPERATORS, LINEAR_OPERATORS = (
    {n: Operator(e) for n, e in _catalogue.OPERATORS.items() if e.is_linear == is_linear and not e.is_gated}
    for is_linear in (False, True)
)
GATED = {name: Operator(entry) for name, entry in _catalogue.FORMS.items() if entry.is_gated}
# With arrays that few models have.
FORMS = {name: Operator(entry) for name, entry in _catalogue.FORMS.items() if entry.given_extras}


def normal(seed: int, shape, dtype, mean: float = 0.0, spread: float = 1.0) -> jax.Array:
    """Random numbers, made by NumPy: JAX would compile a program for each shape and dtype."""
    values = spread * np.random.default_rng([seed, *shape]).standard_normal(shape) + mean
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def arguments(operator: Operator, shape, dtype, *, features=(), parameter_dtype=None, axis=-1, mean=0.0):
    """All arguments that functions of an operator's kind take, absent ones None.

    Every row of x has the given mean and spread 1, and y of a Linear is of the size of its bias.
    """
    sizes = _catalogue.sizes(shape, axis, features)

    def made(seed, array):
        of_rows = array.role == "activation"
        a = array.of(sizes, dtype if of_rows else parameter_dtype or dtype, parameter_dtype or dtype)
        spread = 1 / np.sqrt(a.shape[0]) if array.role == "kernel" else 1.0
        return normal(seed, a.shape, a.dtype, {"x": mean, "scale": 1.0, "x_scale": 1.0}.get(array.name, 0.0), spread)

    return tuple(made(i, a) if a.name in operator.entry.names else None for i, a in enumerate(operator.kind.arguments))


def named(name: str, shape, dtype, *, features=(), **options):
    """All arguments that the operator takes, by name.

    Of several Linears, where `features` has a tuple for each, every second is without a bias.
    """
    operator = (OPERATORS | LINEAR_OPERATORS | GATED)[name]
    several = bool(features) and isinstance(features[0], tuple)
    made = [
        dict(zip(operator.kind.names, arguments(operator, shape, dtype, features=f, **options), strict=True))
        for f in (features if several else (features,))
    ]
    given = {n: a for n, a in made[0].items() if a is not None}
    if several:
        given["kernel"] = tuple(m["kernel"] * (1 + i) for i, m in enumerate(made))
        given["bias"] = tuple(m["bias"] * (1 + i) if i % 2 == 0 else None for i, m in enumerate(made))
    return given


def cotangents(outputs):
    """Cotangents of one shape and yet different: taken for each other they would be noticed."""
    leaves, tree = jax.tree.flatten(outputs)
    return jax.tree.unflatten(tree, [normal(6 + i, a.shape, a.dtype) for i, a in enumerate(leaves)])


def value_and_gradients(operator: Operator, function, operands, cotangent=None):
    """The outputs and, under a random cotangent, every operand's gradient: a dict from name to array."""

    @jax.jit
    def run(operands, cotangent):
        outputs, pullback = jax.vjp(function, *operands)
        return outputs, pullback(cotangent)

    if cotangent is None:
        cotangent = cotangents(jax.eval_shape(function, *operands))
    outputs, gradients = run(operands, cotangent)
    found = (*(outputs if isinstance(outputs, tuple) else (outputs,)), *gradients)
    return {name: np.asarray(a) for name, a in zip(operator.results, found, strict=True) if a is not None}


def truth(operator: Operator, operands, cotangent, total=None, *, zero_centered_scale=False, epsilon=EPSILON):
    """The true values of all results and gradients, and what roundings may change of them: `(values, roundings)`.

    They are in float64 (longdouble for float64 operands), in NumPy, in blocks of rows. roundings is what one rounding
    of each intermediate may change, a number a row or an element (of parameters' gradients, a number an element).

    Of x [M, H], kernel [H, N] and gate [H] or [M, 1]. `total` is the rounded sum that was normalised.
    """
    given = {n: np.asarray(a) for n, a in zip(operator.kind.names, operands, strict=True) if a is not None}
    x, kernel = given["x"], given.get("kernel")
    dy, dtotal = cotangent if isinstance(cotangent, tuple) else (cotangent, None)
    dtype = x.dtype if kernel is None else jnp.promote_types(x.dtype, kernel.dtype)
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    eps = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
    s, b, c = (given[n].astype(wide) if n in given else d for n, d in (("scale", 1), ("offset", 0), ("bias", 0)))
    s = s + zero_centered_scale
    e = given["x_bias"].astype(wide) if "x_bias" in given else 0
    m, h = x.shape
    gate_first = operator.entry.options == _catalogue.GATE_FIRST
    gate = np.broadcast_to(given.get("gate", np.ones((1, 1), x.dtype)), x.shape)
    values, roundings = defaultdict(list), defaultdict(list)
    # Independent errors: each factor's own, and that of each addition, relative to a partial sum as large as the square
    # root of the number of terms.
    sums, squares = defaultdict(int), defaultdict(int)
    block = max(1, 2**20 // h)
    for first in range(0, m, block):
        rows = slice(first, first + block)
        v, d = (np.asarray(a)[rows].astype(wide) for a in (x, dy))
        x_wide, branch, w = v, v + e, gate[rows].astype(wide)
        if in_front := operator.entry.in_front is not None:
            x_rstd = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + wide(epsilon))
            t = given["x_scale"].astype(wide) + zero_centered_scale if "x_scale" in given else np.ones(h, wide)
            x_hat_in_front, branch = v * x_rstd, v * x_rstd * t
        if operator.adds:
            v = w * branch + given["residual"][rows].astype(wide)
            values["total"].append(v)
            # Terms that are larger than their sum have been rounded, too, if they are made here.
            more = in_front or {"x_bias", "gate"} & {*given}
            terms = _largest(w * branch) + _largest(w) * np.max(np.abs(e)) if more else 0
            roundings["total"].append(eps * (_largest(v) + terms))
            v = total[rows].astype(wide)
        silu_rounding = 4 * eps  # its own, and that of what it multiplies
        u, slope = _silu(given["z"][rows].astype(wide)) if "z" in given else (1, 0)
        if gate_first:
            v = v * u
        rounding = eps * _largest(v)  # of the mean, and so of x - mean
        if operator.subtract_mean:
            v = v - v.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + wide(epsilon))
        x_hat = v * rstd
        rounding = rounding * rstd + eps * _largest(x_hat)
        if gate_first:
            rounding = rounding + silu_rounding * _largest(x_hat)
        y = z = x_hat * s + b
        y_rounding = z_rounding = rounding * np.max(np.abs(s)) + eps * _largest(z)
        if operator.entry.adds_behind:
            y = y + given["residual"][rows].astype(wide)
            y_rounding = y_rounding + eps * _largest(y)
        dz, dz_square = d, 0
        if "z" in given and not gate_first:
            y, dz, dz_square = z * u, d * u, (silu_rounding * d * u) ** 2
            y_rounding = y_rounding * np.abs(u) + silu_rounding * np.abs(y)
            values["dz"].append(d * z * slope)
            roundings["dz"].append(z_rounding * np.abs(d * slope) + silu_rounding * np.abs(d * z))
        if kernel is not None:
            k = kernel.astype(wide)
            if dtype.itemsize < 4:  # an operand of the product
                z_rounding = z_rounding + float(jnp.finfo(dtype).eps) * np.abs(z)
            y = z @ k + c
            z_square = np.broadcast_to(z_rounding**2, z.shape)
            y_rounding = np.sqrt(z_square @ k**2 + h * eps**2 * (z**2 @ k**2) + (eps * y) ** 2 + (eps * c) ** 2)
            dz, dz_square = d @ k.T, len(k.T) * eps**2 * (d**2 @ (k**2).T)
            sums["dkernel"] += z.T @ d
            squares["dkernel"] += z_square.T @ d**2 + m * eps**2 * ((z**2).T @ d**2)
            sums["dbias"] += d.sum(0)
            squares["dbias"] += m * eps**2 * (d**2).sum(0)
        g = dz * s
        c1 = g.mean(-1, keepdims=True) if operator.subtract_mean else 0
        c2 = (g * x_hat).mean(-1, keepdims=True)
        g_rounding = np.sqrt(dz_square) * np.abs(s) + eps * _largest(g)
        values["y"].append(y)
        roundings["y"].append(y_rounding)
        of_total = rstd * (g - c1 - x_hat * c2) + (0 if dtotal is None else np.asarray(dtotal)[rows].astype(wide))
        values["dresidual"].append(d if operator.entry.adds_behind else of_total)
        if not in_front:
            values["dx"].append(w * of_total)
        # Of a constant row x_hat is 0 but for rounding, which then counts squared.
        statistics = rounding * (np.abs(c2) + _largest(g) * (_largest(x_hat) + rounding))
        of_total_rounding = rstd * (_largest(g_rounding) + statistics)
        roundings["dresidual"].append(of_total_rounding)
        if in_front:
            of_u, u_rounding = of_total * t, eps * _largest(x_hat_in_front)
            c = (of_u * x_hat_in_front).mean(-1, keepdims=True)
            values["dx"].append(x_rstd * (of_u - x_hat_in_front * c))
            statistics = u_rounding * (np.abs(c) + _largest(of_u) * (_largest(x_hat_in_front) + u_rounding))
            of_u_rounding = of_total_rounding * np.max(np.abs(t)) + eps * _largest(of_u)
            roundings["dx"].append(x_rstd * (of_u_rounding + statistics))
            sums["dx_scale"] += (of_total * x_hat_in_front).sum(0)
            squares["dx_scale"] += (
                (of_total_rounding * x_hat_in_front) ** 2
                + (of_total * u_rounding) ** 2
                + m * (eps * of_total * x_hat_in_front) ** 2
            ).sum(0)
        elif gate_first:
            values["dx"][-1] = of_total * u
            roundings["dx"].append(of_total_rounding * np.abs(u) + silu_rounding * np.abs(of_total * u))
            values["dz"].append(of_total * x_wide * slope)
            of_slope = silu_rounding * np.abs(of_total * x_wide)
            roundings["dz"].append(of_total_rounding * np.abs(x_wide * slope) + of_slope)
        else:
            roundings["dx"].append(of_total_rounding * _largest(w) + eps * _largest(w * of_total) * ("gate" in given))
        if "x_bias" in given:
            sums["dx_bias"] += (w * of_total).sum(0)
            squares["dx_bias"] += ((w * of_total_rounding) ** 2 + m * (eps * w * of_total) ** 2).sum(0)
        if "gate" in given:
            of_gate, square = of_total * branch, (branch * of_total_rounding) ** 2 + (eps * of_total * branch) ** 2
            if given["gate"].shape == x.shape[1:]:
                sums["dgate"] += of_gate.sum(0)
                squares["dgate"] += (square + (m - 1) * (eps * of_gate) ** 2).sum(0)
            else:
                values["dgate"].append(of_gate.sum(1, keepdims=True))
                roundings["dgate"].append(np.sqrt((square + (h - 1) * (eps * of_gate) ** 2).sum(1, keepdims=True)))
        sums["dscale"] += (dz * x_hat).sum(0)
        squares["dscale"] += (dz_square * x_hat**2 + (dz * rounding) ** 2 + m * (eps * dz * x_hat) ** 2).sum(0)
        sums["doffset"] += dz.sum(0)
        squares["doffset"] += (dz_square + m * (eps * dz) ** 2).sum(0)
    values, roundings = ({n: np.concatenate(a) for n, a in of_rows.items()} for of_rows in (values, roundings))
    values |= sums
    roundings |= {n: np.sqrt(a) for n, a in squares.items()}
    return values, roundings


def _silu(z):
    """The value of silu and its derivative."""
    share = 1 / (1 + np.exp(-z))
    return z * share, share * (1 + z * (1 - share))


def _largest(a):
    return np.max(np.abs(a), -1, keepdims=True)


def errors(got, plain, true):
    """Yield of each result (name, error, allowed, plain jnp's largest error), error and allowed by element.

    Allowed is at most twice the error of plain jnp in the same dtype, plus one rounding.
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


def check(operator: Operator, operands, implementation, cotangent=None, *, epsilon=EPSILON, **options):
    """Check every result and gradient by `assert_accurate`. Options are the operator's."""
    ours, plain = (
        functools.partial(operator, epsilon=epsilon, **options, **of)
        for of in ({"implementation": implementation}, {"module": jln.reference})
    )
    if cotangent is None:
        cotangent = cotangents(jax.eval_shape(ours, *operands))
    got = value_and_gradients(operator, ours, operands, cotangent)
    true = truth(operator, operands, cotangent, total=got.get("total"), epsilon=epsilon, **options)
    assert_accurate(got, value_and_gradients(operator, plain, operands, cotangent), true)


def shares(got, plain, true):
    """The largest error of each result by name, as a part of what is allowed; infinite where one is not a number."""
    return {
        name: float(np.max(np.where(error == 0, 0, np.nan_to_num(error / allowed, nan=np.inf)), initial=0.0))
        for name, error, allowed, _ in errors(got, plain, true)
    }
