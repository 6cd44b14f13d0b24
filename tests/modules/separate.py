"""A norm and the Linears behind it as separate layers of each framework, and jln's module that stands for them."""

import functools

import equinox as eqx
import haiku as hk
import jax
from flax import linen, nnx

import jln
from jln import equinox as jln_equinox
from jln import haiku as jln_haiku
from parity import Layer, assert_parity

WITH_LINEARS = ("linen", "nnx", "haiku")  # that have modules of a norm and Linears
FRAMEWORKS = (*WITH_LINEARS, "equinox")


def with_residual(function):
    """A function whose last argument may be a pair of x and the residual."""

    def call(*arguments, **options):
        *others, x = arguments
        x, given = (x[0], {"residual": x[1]}) if isinstance(x, tuple) else (x, {})
        return function(*others, x, **given, **options)

    return call


def applied(x, norm, linears):
    """The result of separate layers of x, or of a pair of x and the residual.

    Of one Linear it is no tuple, and of none it is the norm's result.
    """
    adds = isinstance(x, tuple)
    if type(norm).__module__.startswith("jln."):
        z, total = with_residual(norm)(x)
    else:
        total = sum(x) if adds else x
        z = norm(total)
    ys = tuple(linear(z) for linear in linears) or (z,)
    y = ys if len(ys) > 1 else ys[0]
    return (y, total) if adds else y


# The separate layers as a user writes them, one class a framework, with the framework's norm or ours. `linears`:
# [(name, features)].


class LinenLayers(linen.Module):
    norm: type
    linears: tuple
    both: dict
    use_scale: bool
    precision: object

    @linen.compact
    def __call__(self, x):
        norm = self.norm(use_scale=self.use_scale, name="norm", **self.both)
        options = {"precision": self.precision, **self.both}
        return applied(x, norm, [linen.DenseGeneral(n, **options, name=name) for name, n in self.linears])


class NnxLayers(nnx.Module):
    def __init__(self, norm, linears, both, use_scale, precision, rngs):
        self.norm = norm(8, use_scale=use_scale, **both, rngs=rngs)
        self.names = tuple(name for name, _ in linears)
        for name, n in linears:
            cls = nnx.Linear if isinstance(n, int) else nnx.LinearGeneral
            setattr(self, name, cls(8, n, precision=precision, **both, rngs=rngs))

    def __call__(self, x):
        return applied(x, self.norm, [getattr(self, name) for name in self.names])


class HaikuLayers(hk.Module):
    def __init__(self, norm, linears, use_scale, precision):
        super().__init__(name="layer_norm_linear" if norm.__name__ == "LayerNorm" else "rms_norm_linear")
        options = {"create_offset": True} if norm.__name__ == "LayerNorm" else {}
        self.norm = functools.partial(norm, -1, create_scale=use_scale, **options)
        self.linears, self.precision = linears, precision

    def __call__(self, x):
        linears = [hk.Linear(n, name=name) for name, n in self.linears]
        return applied(x, self.norm(), [functools.partial(a, precision=self.precision) for a in linears])


class EquinoxLayers(eqx.Module):
    norm: eqx.nn.LayerNorm | eqx.nn.RMSNorm

    def __call__(self, x):
        return applied(x, self.norm, ())


def linen_layer(module, call=lambda module: module):
    return Layer(
        lambda x: call(module.init)(jax.random.key(0), x),
        lambda variables, x: call(functools.partial(module.apply, variables))(x),
    )


def nnx_layer(make, call=lambda module: module):
    def apply(variables, x):
        graphdef, state = nnx.split(make(nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, variables)
        return call(nnx.merge(graphdef, state))(x)

    return Layer(lambda x: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(0)))), apply)


def haiku_layer(function):
    module = hk.without_apply_rng(hk.transform(function))
    return Layer(lambda x: module.init(jax.random.key(0), x), module.apply)


def equinox_layer(module):
    """An Equinox module vmapped over the rows. Its variables are its leaves."""
    arrays, rest = eqx.partition(module, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)

    def apply(variables, x):
        return jax.vmap(jax.vmap(eqx.combine(tree.unflatten(variables), rest)))(x)

    return Layer(lambda x: leaves, apply)


ONE = {"linen": "dense", "nnx": "linear", "haiku": "linear"}


def as_given(linears):
    """The Linears as the module takes them: a mapping, or of one Linear its features."""
    return linears[0][1] if len(linears) == 1 else dict(linears)


LIBRARIES = {
    "linen": (linen, jln.linen),
    "nnx": (nnx, jln.nnx),
    "haiku": (hk, jln_haiku),
    "equinox": (eqx.nn, jln_equinox),
}


def separate(framework, norm, linears, use_scale=True, dtype=None, param_dtype="float32", precision=None):
    """The separate layers, behind a norm of this class."""
    if framework == "haiku":
        return haiku_layer(lambda x: HaikuLayers(norm, linears, use_scale, precision)(x))
    if framework == "equinox":
        return equinox_layer(EquinoxLayers(norm(8, use_weight=use_scale, dtype=param_dtype)))
    both = {"dtype": dtype, "param_dtype": param_dtype}
    if framework == "linen":
        return linen_layer(LinenLayers(norm, linears, both, use_scale, precision))
    return nnx_layer(lambda rngs: NnxLayers(norm, linears, both, use_scale, precision, rngs))


def layers(framework, norm, linears, apart=False, **case):
    """Return the separate layers, and ours: one module, or apart, our norm and the framework's Linears.

    Haiku and Equinox have no dtype beside that of their parameters.
    """
    theirs, ours = (getattr(library, norm) for library in LIBRARIES[framework])
    second = separate(framework, ours, linears, **case) if apart else together(framework, norm, linears, **case)
    return separate(framework, theirs, linears, **case), second


def together(framework, norm, linears, use_scale=True, dtype=None, param_dtype="float32", precision=None):
    """The module of ours that stands for all layers."""
    given = as_given(linears)
    if framework == "linen":
        both = {"dtype": dtype, "param_dtype": param_dtype}
        own = getattr(jln.linen, f"{norm}Dense")(given, use_scale=use_scale, precision=precision, **both)
        return linen_layer(own, with_residual)
    if framework == "nnx":
        both = {"dtype": dtype, "param_dtype": param_dtype}
        cls = getattr(jln.nnx, f"{norm}Linear")
        return nnx_layer(
            lambda rngs: cls(8, given, use_scale=use_scale, precision=precision, **both, rngs=rngs), with_residual
        )
    cls = getattr(jln_haiku, f"{norm}Linear")
    return haiku_layer(lambda x: with_residual(cls(given, create_scale=use_scale))(x, precision=precision))


def qkv():
    """Three Linears."""
    return (("q", 6), ("k", 3), ("v", 3))


def parity(framework, norm, linears, x, **case):
    """Assert that our module equals the separate layers, and return the path that ours took."""
    theirs, ours = layers(framework, norm, linears, **case)
    wide = {"param_dtype": "float64"} if framework != "haiku" else {}
    true, _ = layers(framework, norm, linears, **(case | {"dtype": None} | wide))
    return assert_parity(theirs, ours, true, x, products=len(linears))
