"""The frameworks in one table: the norms of each and jln's in their place, and a norm with Linears behind it.

Options have one name here, whatever a framework calls them.
"""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import numpy as np
from flax import linen, nnx

import jln
import jln.equinox
import jln.haiku
import jln.linen
import jln.nnx
from parity import SHAPE, Layer, assert_parity


class Framework(NamedTuple):
    """A framework's own library, jln's in its place, what makes a Layer, and its names of the options of a norm."""

    theirs: types.ModuleType
    ours: types.ModuleType
    layer: Callable[[Callable[..., Any]], Layer]
    names: dict[str, str]
    linear: str = "Linear"


def with_residual(function):
    """A function whose last argument may be a pair of x and the residual."""

    def call(*arguments, **options):
        *others, x = arguments
        x, given = (x[0], {"residual": x[1]}) if isinstance(x, tuple) else (x, {})
        return function(*others, x, **given, **options)

    return call


def of_linen(make):
    module = make()
    return Layer(with_residual(functools.partial(module.init, jax.random.key(0))), with_residual(module.apply))


def of_nnx(make):
    graph, state = nnx.split(make(rngs=nnx.Rngs(0)))
    apply = with_residual(lambda variables, x, **given: nnx.merge(graph, variables)(x, **given))
    return Layer(lambda x, **given: state, apply)


def of_haiku(make):
    module = hk.without_apply_rng(hk.transform(lambda *a, **k: make()(*a, **k)))
    return Layer(with_residual(functools.partial(module.init, jax.random.key(0))), with_residual(module.apply))


def of_equinox(make):
    """A norm of one example, mapped over the axes in front of it. Its variables are its leaves."""
    module = make()
    arrays, rest = eqx.partition(module, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)

    def apply(variables, x, **given):
        call = eqx.combine(tree.unflatten(variables), rest)
        for _ in range(np.ndim(x) - len(module.shape)):
            call = jax.vmap(call)
        return call(x, **given)

    return Layer(lambda x, **given: leaves, with_residual(apply))


FLAX_NAMES = {"use_offset": "use_bias", "offset_init": "bias_init"}
HAIKU_NAMES = {"epsilon": "eps", "use_scale": "create_scale", "use_offset": "create_offset"}
HAIKU_LINEAR_NAMES = {"use_bias": "with_bias", "kernel_init": "w_init", "bias_init": "b_init"}
EQUINOX_NAMES = {"epsilon": "eps", "use_scale": "use_weight", "use_offset": "use_bias", "param_dtype": "dtype"}
FRAMEWORKS = {
    "linen": Framework(linen, jln.linen, of_linen, FLAX_NAMES, "Dense"),
    "nnx": Framework(nnx, jln.nnx, of_nnx, FLAX_NAMES),
    "haiku": Framework(hk, jln.haiku, of_haiku, HAIKU_NAMES),
    "equinox": Framework(eqx.nn, jln.equinox, of_equinox, EQUINOX_NAMES),
}
WITH_LINEARS = ("linen", "nnx", "haiku")
OF_LINEAR = ("use_bias", "kernel_init", "bias_init", "precision")
BOTH = ("dtype", "param_dtype")


def renamed(framework, options, of_linear=False):
    """The options under the framework's own names."""
    names = FRAMEWORKS[framework].names | (HAIKU_LINEAR_NAMES if of_linear else {})
    options = {names.get(name, name): value for name, value in options.items()}
    for parameter in ("scale", "offset"):
        if not options.get(f"create_{parameter}", True):  # Haiku then takes no initialiser
            options.pop(f"{parameter}_init", None)
    return options


def made_norm(framework, library, name, size=8, **options):
    """A function that makes a norm of this name, over the last axis where the options name no other."""
    options = renamed(framework, options)
    first = ()
    if framework == "nnx":
        axes = options.get("feature_axes")
        first = (size if axes is None else int(np.prod([SHAPE[a] for a in np.atleast_1d(axes)])),)
    elif framework == "haiku":
        parameters = {"create_scale": True} | ({"create_offset": True} if name == "LayerNorm" else {})
        options = {"axis": -1} | parameters | options
    elif framework == "equinox":
        options = {"shape": size, "dtype": "float32"} | options
    return functools.partial(getattr(library, name), *first, **options)


def norms(framework: str, name: str = "LayerNorm", **options: Any) -> tuple[Layer, Layer]:
    """The framework's norm and ours."""
    of = FRAMEWORKS[framework]
    theirs, ours = (of.layer(made_norm(framework, library, name, **options)) for library in (of.theirs, of.ours))
    return of_the_sum(theirs), ours


def of_the_sum(layer: Layer) -> Layer:
    """The layer of x, or of the sum of a pair, with the sum as a second result."""

    def apply(variables, x, **given):
        if not isinstance(x, tuple):
            return layer.apply(variables, x, **given)
        total = x[0] + x[1]
        return layer.apply(variables, total, **given), total

    return Layer(lambda x: layer.init(sum(x) if isinstance(x, tuple) else x), apply)


# A norm and the Linears behind it as a user writes them. norm: what makes it. linears: a name and what makes a Linear.


def called_in_turn(x: Any, norm: Any, linears: Iterable[Any]) -> Any:
    z = norm(x)
    ys = tuple(linear(z) for linear in linears)
    return ys if len(ys) > 1 else ys[0]


class LinenLayers(linen.Module):
    norm: Any
    linears: Any

    @linen.compact
    def __call__(self, x):
        return called_in_turn(x, self.norm(name="norm"), (make(name=name) for name, make in self.linears))


class NnxLayers(nnx.Module):
    def __init__(self, norm, linears, rngs):
        self.norm = norm(rngs=rngs)
        self.names = tuple(name for name, _ in linears)
        for name, make in linears:
            setattr(self, name, make(rngs=rngs))

    def __call__(self, x):
        return called_in_turn(x, self.norm, (getattr(self, name) for name in self.names))


class HaikuLayers(hk.Module):
    def __init__(self, norm, linears, precision, name):
        super().__init__(name=name)
        self.norm, self.linears, self.precision = norm, linears, precision

    def __call__(self, x):
        linears = (functools.partial(make(name=name), precision=self.precision) for name, make in self.linears)
        return called_in_turn(x, self.norm(), linears)


def made_apart(framework, name, features, size=8, **options):
    """A function that makes the framework's own layers."""
    both = {k: v for k, v in options.items() if k in BOTH}
    of_linear = {k: v for k, v in options.items() if k in OF_LINEAR}
    of_norm = {k: v for k, v in options.items() if k not in (*BOTH, *OF_LINEAR)}
    norm = made_norm(framework, FRAMEWORKS[framework].theirs, name, size, **of_norm, **both)
    sizes = features if isinstance(features, dict) else {FRAMEWORKS[framework].linear.lower(): features}
    if framework == "haiku":
        precision = of_linear.pop("precision", None)
        of_linear = renamed(framework, of_linear, of_linear=True)
        linears = [(n, functools.partial(hk.Linear, size, **of_linear)) for n, size in sizes.items()]
        own_name = "layer_norm_linear" if name == "LayerNorm" else "rms_norm_linear"
        return functools.partial(HaikuLayers, norm, linears, precision, own_name)
    layers, one, general, first = {
        "linen": (LinenLayers, linen.Dense, linen.DenseGeneral, ()),
        "nnx": (NnxLayers, nnx.Linear, nnx.LinearGeneral, (size,)),
    }[framework]
    linears = tuple(
        (n, functools.partial(one if isinstance(of, int) else general, *first, of, **of_linear, **both))
        for n, of in sizes.items()
    )
    return functools.partial(layers, norm, linears)


def made_together(framework, name, features, size=8, **options):
    """A function that makes our module that stands for all of them."""
    cls = getattr(FRAMEWORKS[framework].ours, name + FRAMEWORKS[framework].linear)
    if framework == "haiku":
        precision = options.pop("precision", None)
        options = renamed(framework, options, of_linear=True)
        return lambda: functools.partial(cls(features, **options), precision=precision)
    return functools.partial(cls, *((size,) if framework == "nnx" else ()), features, **options)


def with_linears(framework: str, name: str = "LayerNorm", features: Any = 6, **options: Any) -> tuple[Layer, Layer]:
    """The framework's norm and Linears, and our module that stands for them."""
    theirs, ours = (
        FRAMEWORKS[framework].layer(made(framework, name, features, **options)) for made in (made_apart, made_together)
    )
    return of_the_sum(theirs), ours


def parity(make: Callable[..., tuple[Layer, Layer]], framework: str, case: dict[str, Any], x: Any) -> str:
    """Assert that ours of `norms` or `with_linears` equals the framework's, and return the path that it took."""
    theirs, ours = make(framework, **case)
    wide = {"dtype": None, "param_dtype": "float64"} if framework in ("linen", "nnx") else {}
    wide |= {"use_fast_variance": False} if "use_fast_variance" in case else {}
    true, _ = make(framework, **(case | wide))
    features = case.get("features")
    return assert_parity(theirs, ours, true, x, products=len(features) if isinstance(features, dict) else 1)
