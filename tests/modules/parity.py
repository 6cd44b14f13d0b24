"""Parity: what it means that a layer of ours equals the framework's own.

The same constructor arguments give the same variable tree: names, shapes, dtypes, initial values. Then, with the same
variables, an input and a random cotangent, the result and every gradient have the same dtype and shape, and

- on the plain path are the same bits;
- on jln's path are within one rounding of the framework's own error: no further from the truth, the framework's layer
  in float64 with the two-pass variance, than the framework's largest error plus one rounding of the dtype, plus one
  float32 rounding for each of the eight operations between an input and a result.

What the framework rejects, ours rejects with the same type of exception.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jln import _explain

OPERATIONS = 8
SHAPE = (3, 4, 8)
MASK = np.random.default_rng(0).random(SHAPE) > 0.3


class Layer(NamedTuple):
    """A layer as two functions. init: x -> variables, a pytree. apply: (variables, x) -> y.

    x and y are an array, or a pytree of several.
    """

    init: Callable[[Any], Any]
    apply: Callable[[Any, Any], Any]


@contextlib.contextmanager
def noting() -> Iterator[list[_explain.Route]]:
    """Collect the routes of the calls made in the context."""
    routes: list[_explain.Route] = []
    with _explain.listen(lambda route, _: routes.append(route)):
        yield routes


def normal(seed: int, shape: Sequence[int], dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(dtype)


def doubled(args, dtype=None):
    """A promote_dtype of the user's, for Flax NNX: not a mere cast."""
    from flax.nnx.nn import dtypes

    return tuple(None if a is None else 2 * a for a in dtypes.promote_dtype(args, dtype=dtype))


def pairwise(arguments: Mapping[str, Sequence[Any]], only_layer_norm: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A few choices of a value for each argument, in which every pair of values of two arguments occurs.

    The first choice is every argument's first value, the default. Where the argument "norm" is "RMSNorm", those that
    only a LayerNorm has are left out. Greedy: each choice takes, argument by argument, the value that settles most
    pairs still open.
    """
    names = sorted(arguments, key=lambda name: name != "norm")
    rms = list(arguments.get("norm", ())).index("RMSNorm") if "norm" in arguments else None

    def left_out(name: str, row: Mapping[str, int]) -> bool:
        return name in only_layer_norm and rms is not None and row.get("norm") == rms

    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(arguments[a]))
        for j in range(len(arguments[b]))
        if not left_out(b, {a: i})
    }
    rows = []

    def settled(row: dict[str, int]) -> set:
        row = {name: value for name, value in row.items() if not left_out(name, row)}
        return {p for p in open_pairs if row.get(p[0], -1) == p[1] and row.get(p[2], -1) == p[3]}

    while open_pairs or not rows:
        row: dict[str, int] = {}
        if not rows:
            row = dict.fromkeys(names, 0)
        else:
            a, i, b, j = min(open_pairs, key=str)
            row = {a: i, b: j}
            if rms is not None and {a, b} & set(only_layer_norm):
                row["norm"] = 1 - rms
            for name in names:
                if name not in row:
                    row[name] = max(range(len(arguments[name])), key=lambda v: len(settled(row | {name: v})))
        open_pairs -= settled(row)
        rows.append({name: arguments[name][row[name]] for name in names if not left_out(name, row)})
    return rows


def pairwise_parameters(arguments: Mapping[str, Sequence[Any]], only_layer_norm: Sequence[str] = ()) -> list[Any]:
    """The choices of `pairwise` for parametrize. Without the heavy ones every single value still occurs."""
    seen: set[tuple[str, int]] = set()
    parameters = []
    for row in pairwise(arguments, only_layer_norm):
        values = {(name, next(i for i, v in enumerate(arguments[name]) if v is row[name])) for name in row}
        marks = [pytest.mark.heavy] if values <= seen else []
        seen |= values
        parameters.append(pytest.param(row, id=described(row), marks=marks))
    return parameters


def every_equation(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those within it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        if not equation.primitive.name.startswith("jln_"):  # which carry their computation with them
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda a: hasattr(a, "eqns")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from every_equation(inner)


def precisions(apply: Callable[[Any, Any], jax.Array], variables: Any, x: jax.Array) -> list[Any]:
    """The precisions of the products of a fused pair, forward and backward, which no number tells on a CPU."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda variables: jnp.sum(apply(variables, x))))(variables)
    operators = [e for e in every_equation(jaxpr) if e.primitive.name.startswith("jln_norm_linear")]
    products = [e for e in every_equation(jaxpr) if e.primitive.name == "dot_general"]
    assert (len(operators), len(products)) in ((2, 0), (0, 3))  # in one kernel each way, or in plain sight
    given = [e.params["request"].settings.precision for e in operators] + [e.params["precision"] for e in products]
    return [p for precision in given for p in np.ravel(precision)]


def described(case: Mapping[str, Any]) -> str:
    """A test's name for a case, the same in every process."""
    plain = (int, float, str, tuple, list, slice, type(None), jax.lax.Precision)

    def value(v: Any) -> Any:
        if hasattr(v, "shape"):
            return "given"
        return v if isinstance(v, plain) else getattr(v, "__name__", type(v).__name__)

    return " ".join(f"{k}={value(v)}" for k, v in case.items()) or "default"


def named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same_variables(theirs: Any, ours: Any) -> None:
    assert jax.tree.structure(theirs) == jax.tree.structure(ours)
    for (name, a), b in zip(named(theirs).items(), named(ours).values(), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        np.testing.assert_array_equal(a, b, name)


def randomised(variables: Any) -> Any:
    """Variables around 1: at 0 and 1 themselves a layer might forget to multiply or to add."""
    leaves, tree = jax.tree.flatten(variables)
    return tree.unflatten([1 + 0.5 * normal(i, a.shape, a.dtype) for i, a in enumerate(leaves)])


def results(layer: Layer, variables: Any, x: Any, dy: Any) -> dict[str, np.ndarray]:
    """The results of a layer: y and every gradient under `dy`."""

    @jax.jit
    def run(variables, x, dy):
        y, pullback = jax.vjp(layer.apply, variables, x)
        return y, pullback(jax.tree.map(lambda d, a: d.astype(a.dtype), dy, y))

    y, (dvariables, dx) = run(variables, x, dy)
    of_y, of_x = ({f"{name}{k}": a for k, a in named(tree).items()} for name, tree in (("y", y), ("dx", dx)))
    return {k: np.asarray(a) for k, a in (of_y | of_x | named(dvariables)).items()}


def assert_parity(theirs: Layer, ours: Layer, true: Layer, x: Any, products: int = 1) -> str:
    """Assert that two layers are equal, and return the path that ours took.

    true: the framework's layer for float64 variables and x. products: how many read one norm.
    """
    try:
        variables = theirs.init(x)
        shape = jax.eval_shape(theirs.apply, variables, x)
    except Exception as error:
        with pytest.raises(type(error)):
            ours.apply(ours.init(x), x)
        return "rejected"
    assert_same_variables(variables, ours.init(x))
    variables = randomised(variables)
    shapes, tree = jax.tree.flatten(shape)
    dy = tree.unflatten([normal(99 + i, a.shape, a.dtype) for i, a in enumerate(shapes)])
    with noting() as routes:
        got = results(ours, variables, x, dy)
    wanted = results(theirs, variables, x, dy)
    path = routes[-1].path  # of the norm, where the layers of a pair are called
    sums = max(products - 1, 0) if path == "norm" else 0
    # A sum of fewer digits than its norm: XLA leaves its rounding out between the framework's own layers.
    sums += jnp.finfo(shapes[-1].dtype).eps > jnp.finfo(shapes[0].dtype).eps
    if path != "plain":
        truth = results(true, *jax.tree.map(lambda a: a.astype("float64"), (variables, x, dy)))
        assert got.keys() == wanted.keys() == truth.keys()
    for name, a in got.items():
        b = wanted[name]
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if path == "plain":
            np.testing.assert_array_equal(a, b, name)
        else:
            y_dtype = max((a.dtype for a in shapes), key=lambda d: jnp.finfo(d).eps)
            # In bfloat16 dz goes through memory rounded, from the product to the norm (term 14).
            rounded_dz = path == "fused" and name.startswith("dx") and y_dtype == jnp.bfloat16
            assert_close(name, a, b, truth[name], y_dtype, sums + rounded_dz)
    return path


def assert_close(
    name: str, ours: np.ndarray, theirs: np.ndarray, true: np.ndarray, y_dtype: Any, sums: int = 0
) -> None:
    """Assert that a result of ours is no further from the truth than theirs, but for roundings.

    The dtype of a float32 gradient that was rounded to 16 bits on its way, as that of y, is those 16 bits.

    sums: of cotangents that autodiff added up in that dtype before a kernel read them, or rounded to it behind one.
      Each is half a rounding of the largest, which XLA leaves out where all is the framework's own code.
    """
    eps = max(float(jnp.finfo(dtype).eps) for dtype in (ours.dtype, y_dtype))
    compute = float(jnp.finfo(jnp.promote_types(ours.dtype, "float32")).eps)
    error = np.abs(ours.astype("float64") - true)
    largest = np.max(np.abs(theirs.astype("float64") - true), initial=0)
    highest = np.max(np.abs(true), initial=0)
    allowed = largest + eps * np.abs(true) + (OPERATIONS * compute + sums * eps / 2) * highest
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    assert error[worst] <= allowed[worst], (
        f"{name}{list(map(int, worst))}: {ours[worst]} for {true[worst]}; the framework's own is {theirs[worst]}, its "
        f"largest error {largest:.3e}"
    )
