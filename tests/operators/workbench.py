"""Data, truth and tolerances that the tests share."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import catalogue
import jln
from catalogue import EPSILON


@dataclasses.dataclass(frozen=True)
class Operator:
    """A public function as the tests call it: with all arguments of its kind in order, absent ones None.

    Those of the norms take a residual, which may be None.
    """

    entry: catalogue.Operator

    name = property(lambda self: self.entry.name)
    adds = property(lambda self: self.entry.adds)
    subtract_mean = property(lambda self: self.entry.centres)

    @property
    def kind(self):
        if self.entry.both_sides or self.entry.is_gated:
            return self.entry
        is_linear = self.entry.is_linear
        fullest = "add_" * (self.adds or not is_linear) + "layer_norm" + "_linear" * is_linear
        return catalogue.OPERATORS[fullest].including(*self.entry.given_extras)

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
    {n: Operator(e) for n, e in catalogue.OPERATORS.items() if e.is_linear == is_linear and not e.is_gated}
    for is_linear in (False, True)
)
GATED = {name: Operator(entry) for name, entry in catalogue.FORMS.items() if entry.is_gated}
# With arrays that few models have.
FORMS = {name: Operator(entry) for name, entry in catalogue.FORMS.items() if entry.given_extras}


def normal(seed: int, shape, dtype, mean: float = 0.0, spread: float = 1.0) -> jax.Array:
    """Random numbers, made by NumPy: JAX would compile a program for each shape and dtype."""
    values = spread * np.random.default_rng([seed, *shape]).standard_normal(shape) + mean
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def arguments(operator: Operator, shape, dtype, *, features=(), parameter_dtype=None, axis=-1, mean=0.0):
    """All arguments that functions of an operator's kind take, absent ones None.

    Every row of x has the given mean and spread 1, and y of a Linear is of the size of its bias.
    """
    sizes = catalogue.sizes(shape, axis, features)

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

    They are in float64 (longdouble for float64 operands), in NumPy. roundings is what one rounding of each intermediate
    may change, a number a row or an element (of parameters' gradients, a number an element).

    Of x [M, H], kernel [H, N] and gate [H] or [M, 1]. `total` is the rounded sum that was normalised.
    """
    given = {n: np.asarray(a) for n, a in zip(operator.kind.names, operands, strict=True) if a is not None}
    x, kernel = given["x"], given.get("kernel")
    dy, dtotal = cotangent if isinstance(cotangent, tuple) else (cotangent, None)
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    rows = {n: given.pop(n) for n in ("x", "residual", "z") if n in given}
    rows |= {"dy": dy, "dtotal": dtotal, "total": total}
    rows["gate"] = np.broadcast_to(given.get("gate", np.ones((1, 1), x.dtype)), x.shape)
    rows = {n: np.asarray(a).astype(wide) for n, a in rows.items() if a is not None}
    shared = {n: a.astype(wide) for n, a in given.items()}
    shared |= {n: shared[n] + zero_centered_scale for n in ("scale", "x_scale") if n in shared}
    dtype = x.dtype if kernel is None else jnp.promote_types(x.dtype, kernel.dtype)
    true = _Truth(operator.entry, shared, len(x), dtype, wide(epsilon))
    branch, relative, back_through_branch = _branch(true, rows)
    v, relative, back_through_total = _total(true, rows, branch, relative)
    z, rounding, back_through_norm = _norm(true, v, relative)
    dz, square = _behind(true, rows, z, rounding)
    back_through_branch(*back_through_total(*back_through_norm(dz, square)))
    return true.values, true.roundings


# Each paragraph of the sentence, of rows [m, H] and of the operands that all rows share. It returns its value, what one
# rounding of each intermediate may change of that (`relative`: as a part of it), and the way back: a function that
# keeps gradients and takes a cotangent, with what roundings may change of it, to what the paragraph began with.


def _branch(true: _Truth, rows):
    """The branch: `x + x_bias`, `rms_norm(x, x_scale)` or `x * silu(z)`."""
    x, eps = rows["x"], true.eps
    u, slope = _silu(rows["z"]) if "z" in rows else (1, 0)

    def to_x(d, rounding):
        true.keep("dx", d, _largest(rounding) + eps * _largest(d) * ("gate" in true.shared))
        if "x_bias" in true.shared:
            true.add("dx_bias", d, rounding**2 + true.m * (eps * d) ** 2)

    def to_x_and_z(d, rounding):
        true.keep("dx", d * u, rounding * np.abs(u) + true.of_silu * np.abs(d * u))
        true.keep("dz", d * x * slope, rounding * np.abs(x * slope) + true.of_silu * np.abs(d * x))

    if true.entry.options == catalogue.GATE_FIRST:
        return x * u, true.of_silu, to_x_and_z
    if not true.entry.both_sides:
        return x + true.shared.get("x_bias", 0), 0, to_x

    x_hat, x_hat_rounding, through = _normalised(true, x, 0, centres=False)
    scale = true.shared.get("x_scale", 1)

    def to_x_and_its_scale(d, rounding):
        changed = (rounding * x_hat) ** 2 + (d * x_hat_rounding) ** 2
        true.add("dx_scale", d * x_hat, changed + true.m * (eps * d * x_hat) ** 2)
        g, largest = d * scale, _largest(rounding) + eps * _largest(d) * ("gate" in true.shared)
        true.keep("dx", *through(g, largest * np.max(np.abs(scale)) + eps * _largest(g)))

    return x_hat * scale, 0, to_x_and_its_scale


def _total(true: _Truth, rows, branch, relative):
    """The sum `residual + gate * branch`: kept as it is, and returned as it was rounded."""
    if not true.entry.adds:
        return branch, relative, lambda d, rounding: (d, rounding)
    gate, eps = rows["gate"], true.eps
    total = gate * branch + rows["residual"]
    # Terms that are larger than their sum have been rounded, too, if they are made here.
    more = true.entry.both_sides or {"x_bias", "gate"} & {*true.shared}
    terms = _largest(gate * branch) + _largest(gate) * np.max(np.abs(true.shared.get("x_bias", 0))) if more else 0
    true.keep("total", total, eps * (_largest(total) + terms))

    def back(d, rounding):
        d = d + rows.get("dtotal", 0)
        true.keep("dresidual", d, rounding)
        if "gate" in true.shared:
            of_gate, square = d * branch, (branch * rounding) ** 2 + (eps * d * branch) ** 2
            if true.shared["gate"].ndim == 1:
                true.add("dgate", of_gate, square + (true.m - 1) * (eps * of_gate) ** 2)
            else:
                squares = (square + (gate.shape[1] - 1) * (eps * of_gate) ** 2).sum(1, keepdims=True)
                true.keep("dgate", of_gate.sum(1, keepdims=True), np.sqrt(squares))
        return gate * d, np.abs(gate) * rounding

    return rows["total"], 0, back


def _norm(true: _Truth, total, relative):
    """The norm of the total, `x_hat * scale + offset`."""
    eps, scale = true.eps, true.shared.get("scale", 1)
    # The mean is rounded, and so x - mean.
    x_hat, rounding, through = _normalised(
        true, total, eps * _largest(total), centres=true.entry.centres, relative=relative
    )
    z = x_hat * scale + true.shared.get("offset", 0)

    def back(dz, square):
        changed = square * x_hat**2 + (dz * rounding) ** 2
        true.add("dscale", dz * x_hat, changed + true.m * (eps * dz * x_hat) ** 2)
        true.add("doffset", dz, square + true.m * (eps * dz) ** 2)
        g = dz * scale
        return through(g, np.sqrt(square) * np.abs(scale) + eps * _largest(g))

    return z, rounding * np.max(np.abs(scale)) + eps * _largest(z), back


def _behind(true: _Truth, rows, z, rounding):
    """Keep y, with what is behind the norm: `[* silu(z)] [+ residual] [@ kernel + bias]`.

    Returns the cotangent of what the norm gives and the square of what roundings may change of it.
    """
    y, y_rounding, d, eps = z, rounding, rows["dy"], true.eps
    dz, square = d, 0
    if "z" in rows and true.entry.options != catalogue.GATE_FIRST:
        u, slope = _silu(rows["z"])
        true.keep("dz", d * z * slope, rounding * np.abs(d * slope) + true.of_silu * np.abs(d * z))
        y, dz, square = z * u, d * u, (true.of_silu * d * u) ** 2
        y_rounding = rounding * np.abs(u) + true.of_silu * np.abs(y)
    if true.entry.adds_behind:
        y = y + rows["residual"]
        y_rounding = y_rounding + eps * _largest(y)
        true.keep("dresidual", d, np.zeros_like(d))
    if "kernel" in true.shared:
        k, c = true.shared["kernel"], true.shared.get("bias", 0)
        if true.dtype.itemsize < 4:  # an operand of the product
            rounding = rounding + float(jnp.finfo(true.dtype).eps) * np.abs(z)
        y = z @ k + c
        z_square = np.broadcast_to(rounding**2, z.shape)
        y_rounding = np.sqrt(z_square @ k**2 + len(k) * eps**2 * (z**2 @ k**2) + (eps * y) ** 2 + (eps * c) ** 2)
        dz, square = d @ k.T, len(k.T) * eps**2 * (d**2 @ (k**2).T)
        true.keep("dkernel", z.T @ d, np.sqrt(z_square.T @ d**2 + true.m * eps**2 * ((z**2).T @ d**2)))
        true.add("dbias", d, true.m * eps**2 * d**2)
    true.keep("y", y, y_rounding)
    return dz, square


def _normalised(true: _Truth, v, rounding, *, centres, relative=0):
    """Return x_hat of v, what roundings may change of it, and the way back through the statistics."""
    if centres:
        v = v - v.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + true.epsilon)
    x_hat = v * rstd
    rounding = rounding * rstd + true.eps * _largest(x_hat) + relative * _largest(x_hat)

    def through(g, g_rounding):
        c1 = g.mean(-1, keepdims=True) if centres else 0
        c2 = (g * x_hat).mean(-1, keepdims=True)
        # Of a constant row x_hat is 0 but for rounding, which then counts squared.
        statistics = rounding * (np.abs(c2) + _largest(g) * (_largest(x_hat) + rounding))
        return rstd * (g - c1 - x_hat * c2), rstd * (_largest(g_rounding) + statistics)

    return x_hat, rounding, through


class _Truth:
    """The truth: values by name, and what roundings may change of them.

    entry, shared: the operator and the operands that all rows share. m: all rows. dtype: of a product's operands.

    Errors are independent: each factor's own, and that of each addition, relative to a partial sum as large as the
    square root of the number of terms.
    """

    def __init__(self, entry: catalogue.Operator, shared, m, dtype, epsilon):
        self.entry, self.shared, self.m, self.dtype, self.epsilon = entry, shared, m, dtype, epsilon
        self.eps = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
        self.of_silu = 4 * self.eps  # its own rounding, and that of what it multiplies
        self.values, self.roundings = {}, {}

    def keep(self, name, value, rounding):
        self.values[name], self.roundings[name] = value, rounding

    def add(self, name, of_rows, squares):
        """Keep what all rows share, the sum of what each has."""
        self.keep(name, of_rows.sum(0), np.sqrt(squares.sum(0)))


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


def check(operator: Operator, operands, implementation, cotangent=None, *, epsilon=EPSILON, ours_alone=None, **options):
    """Check every result and gradient by `assert_accurate`. Options are the operator's, and what is `ours_alone`."""
    ours, plain = (
        functools.partial(operator, epsilon=epsilon, **options, **of)
        for of in ({"implementation": implementation, **(ours_alone or {})}, {"module": jln.reference})
    )
    if cotangent is None:
        cotangent = cotangents(jax.eval_shape(ours, *operands))
    got, expected = (value_and_gradients(operator, f, operands, cotangent) for f in (ours, plain))
    options.pop("dtype", None)  # to which results are rounded
    true = truth(operator, operands, cotangent, total=got.get("total"), epsilon=epsilon, **options)
    assert_accurate(got, expected, true)


def shares(got, plain, true):
    """The largest error of each result by name, as a part of what is allowed; infinite where one is not a number."""
    return {
        name: float(np.max(np.where(error == 0, 0, np.nan_to_num(error / allowed, nan=np.inf)), initial=0.0))
        for name, error, allowed, _ in errors(got, plain, true)
    }


def assert_rows_are_independent(rows, width):
    """Assert that y and dx of one row, and of some, by themselves are bit for bit what they are among all rows.

    In float32: 16 bits would round away what another order of additions changes.
    """
    x, _, scale, offset = arguments(OPERATORS["layer_norm"], (rows, width), "float32")
    dy = normal(9, x.shape, x.dtype)

    def run(some):
        y, pullback = jax.vjp(lambda x: jln.layer_norm(x, scale, offset, implementation="triton"), x[some])
        return y, *pullback(dy[some])

    everything = run(slice(None))
    for some in (slice(rows // 2, rows // 2 + 1), slice(rows // 4, rows - 4)):
        for alone, among in zip(run(some), everything, strict=True):
            np.testing.assert_array_equal(alone, among[some])
