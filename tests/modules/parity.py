"""Parity: what it means that a layer of ours equals the framework's own.

The same constructor arguments give the same variable tree: names, shapes, dtypes, initial values. Then, with the same
variables, an input and a random cotangent, the result and every gradient have the same dtype and shape, and are no
further from the truth, the framework's layer in float64 with the two-pass variance, than the framework's largest error
plus one rounding of the dtype, plus one float32 rounding for each of the eight operations between input and result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from combinations import covering
from jln import _routes

OPERATIONS = 8
# From jaxlib 0.12 on it adds a transposed product of bfloat16 up in bfloat16, with this library or without.
WITHOUT_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""} if jaxlib.version.__version_info__ >= (0, 12) else None
SHAPE = (3, 4, 8)


class Layer(NamedTuple):
    """A layer as two functions. init: x -> variables, a pytree. apply: (variables, x) -> y.

    x is an array, or a pair of it and a residual. Both functions take the other arguments of a module's call, too.
    """

    init: Callable[..., Any]
    apply: Callable[..., Any]


@contextlib.contextmanager
def noting() -> Iterator[list[_routes.Route]]:
    """Collect the routes of the calls made in the context."""
    routes: list[_routes.Route] = []
    with _routes.listen(lambda route, _: routes.append(route)):
        yield routes


def normal(seed: int, shape: Sequence[int], dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(dtype)


ONLY_LAYER_NORM = ("use_offset", "offset_init", "use_fast_variance")  # but in Equinox


def pairwise(tables: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[Any]:
    """Choices of a value for each argument, for parametrize, in which every pair of values of two arguments occurs.

    tables: from each framework to its arguments, of which "name" is that of the norm. The first choice is every
    argument's first value, the others are random. Without the heavy ones every value still occurs.
    """
    choices = []
    for framework, arguments in tables.items():
        random, seen = np.random.default_rng(0), set()
        rows = [{name: of[0] for name, of in arguments.items()}]
        rows += [{name: of[random.integers(len(of))] for name, of in arguments.items()} for _ in range(400)]
        if framework != "equinox":
            rows = [{k: v for k, v in r.items() if r["name"] != "RMSNorm" or k not in ONLY_LAYER_NORM} for r in rows]
        for row in (rows[i] for i in sorted({0} | covering(rows))):
            values = {(name, repr(value)) for name, value in row.items()}
            if row["residual"] is None:
                values.add(("dtypes", row["x"], row.get("param_dtype")))
            marks = [pytest.mark.heavy] if values <= seen else []
            choices.append(pytest.param(framework, row, id=f"{framework} {described(row)}", marks=marks))
            seen |= values
    return choices


def every_equation(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those within it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        if not equation.primitive.name.startswith("jln_"):  # which carry their computation with them
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda a: hasattr(a, "eqns")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from every_equation(inner)


def described(case: Mapping[str, Any]) -> str:
    """A test's name for a case, the same in every process."""
    plain = (int, float, str, tuple, list, dict, slice, type(None), jax.lax.Precision)

    def value(v: Any) -> Any:
        if hasattr(v, "shape"):
            return "given"
        return v if isinstance(v, plain) else getattr(v, "__name__", type(v).__name__)

    return " ".join(f"{k}={value(v)}" for k, v in case.items())


def named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def randomised(variables: Any) -> Any:
    """Variables around 1: at 0 and 1 themselves a layer might forget to multiply or to add."""
    leaves, tree = jax.tree.flatten(variables)
    return tree.unflatten([1 + 0.5 * normal(i, a.shape, a.dtype) for i, a in enumerate(leaves)])


def results(layer: Layer, variables: Any, x: Any, dy: Any) -> dict[str, np.ndarray]:
    """The results of a layer: y and every gradient under `dy`."""

    @functools.partial(jax.jit, compiler_options=WITHOUT_YNNPACK)
    def run(variables, x, dy):
        y, pullback = jax.vjp(layer.apply, variables, x)
        return y, pullback(jax.tree.map(lambda d, a: d.astype(a.dtype), dy, y))

    y, (dvariables, dx) = run(variables, x, dy)
    of_y, of_x = ({f"{name}{k}": a for k, a in named(tree).items()} for name, tree in (("y", y), ("dx", dx)))
    return {k: np.asarray(a) for k, a in (of_y | of_x | named(dvariables)).items()}


def assert_parity(theirs: Layer, ours: Layer, true: Layer, x: Any, products: int = 1) -> str:
    """Assert that two layers are equal, and return the path that ours took, "norm" or "fused".

    true: the framework's layer for float64 variables and x. products: how many read one norm.
    """
    variables = theirs.init(x)
    shape = jax.eval_shape(theirs.apply, variables, x)
    own = ours.init(x)
    assert jax.tree.structure(own) == jax.tree.structure(variables)
    for (name, a), b in zip(named(own).items(), named(variables).values(), strict=True):
        np.testing.assert_array_equal(a, b, name, strict=True)
    variables = randomised(variables)
    shapes, tree = jax.tree.flatten(shape)
    dy = tree.unflatten([normal(99 + i, a.shape, a.dtype) for i, a in enumerate(shapes)])
    with noting() as routes:
        got = results(ours, variables, x, dy)
    wanted = results(theirs, variables, x, dy)
    path = routes[-1].path  # of the norm, where the layers of a pair are called
    # Cotangents that autodiff adds up in y's dtype before a kernel reads them, or that are rounded to it behind one:
    # half a rounding of the largest each, which XLA leaves out where all is the framework's own code.
    sums = max(products - 1, 0) if path == "norm" else 0
    # A sum of fewer digits than its norm: XLA leaves its rounding out between the framework's own layers.
    sums += jnp.finfo(shapes[-1].dtype).eps > jnp.finfo(shapes[0].dtype).eps
    truth = results(true, *jax.tree.map(lambda a: a.astype("float64"), (variables, x, dy)))
    assert got.keys() == wanted.keys() == truth.keys()
    y_dtype = max((a.dtype for a in shapes), key=lambda d: jnp.finfo(d).eps)
    for name, a in got.items():
        b, t = wanted[name], truth[name]
        assert a.dtype == b.dtype and a.shape == b.shape, name
        # In bfloat16 dz goes through memory rounded, from the product to the norm (term 14).
        rounded = sums + (path == "fused" and name.startswith("dx") and y_dtype == jnp.bfloat16)
        # The dtype of a float32 gradient that was rounded to 16 bits on its way, as that of y, is those 16 bits.
        eps = max(float(jnp.finfo(dtype).eps) for dtype in (a.dtype, y_dtype))
        compute = float(jnp.finfo(jnp.promote_types(a.dtype, "float32")).eps)
        largest, highest = np.max(np.abs(b.astype("float64") - t), initial=0), np.max(np.abs(t), initial=0)
        allowed = largest + eps * np.abs(t) + (OPERATIONS * compute + rounded * eps / 2) * highest
        excess = np.abs(a.astype("float64") - t) - allowed
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        assert excess[worst] <= 0, (
            f"{name}{list(map(int, worst))}: {a[worst]} for {t[worst]}; the framework's own is {b[worst]}, its largest "
            f"error {largest:.3e}"
        )
    return path
