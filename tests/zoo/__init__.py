"""The zoo: the shapes of blocks that people train, as small models in the framework that such models use.

The models know nothing of jln: `jln.fuse` finds what it takes. Their sizes are those of tests, `SMALL`, and for
compiling, each client's `large`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.extend.core import Literal

import jln
from jln._tools.catalogue import OPERATORS
from zoo import equinox_models, haiku_models, linen_models, nnx_models
from zoo.common import SMALL, Client, Size

__all__ = ["CLIENTS", "SMALL", "Client", "Found", "Model", "Size", "found", "held", "made"]

CLIENTS: Mapping[str, Client] = (
    nnx_models.CLIENTS | linen_models.CLIENTS | haiku_models.CLIENTS | equinox_models.CLIENTS
)


class Model(NamedTuple):
    """A model's function of parameters and x; of these their shapes and dtypes."""

    function: Callable[[Any, Any], jax.Array]
    parameters: Any
    x: jax.ShapeDtypeStruct


def made(client: Client, size: Size) -> Model:
    x = jax.ShapeDtypeStruct(size.shape, size.dtype)
    return Model(*_OF[client.framework](client, size, x), x)


def _of_nnx(client: Client, size: Size, _: Any) -> tuple:
    graph, state = nnx.split(nnx.eval_shape(lambda: client.model(size)))
    return lambda state, x: nnx.merge(graph, state)(x), state


def _of_equinox(client: Client, size: Size, _: Any) -> tuple:
    model = eqx.filter_eval_shape(client.model, size)
    arrays, rest = eqx.partition(model, lambda a: isinstance(a, jax.ShapeDtypeStruct))
    leaves, tree = jax.tree.flatten(arrays)
    return lambda leaves, x: eqx.combine(tree.unflatten(leaves), rest)(x), leaves


def _of_transformed(client: Client, size: Size, x: Any) -> tuple:
    model: nn.Module | hk.Transformed = client.model(size)
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), x)


_OF = {"nnx": _of_nnx, "equinox": _of_equinox, "linen": _of_transformed, "haiku": _of_transformed}


class Found(NamedTuple):
    """Counts of what `jln.explain` lists of a fused function; the body of a scan counts once.

    norms: those that operators compute. sums: with a norm in one operator. linears: norms that are one operator with
      the Linears behind. left: norms that stay as they are.
    """

    norms: int
    sums: int
    linears: int
    left: int


def found(fused: Callable[..., Any], *args: Any) -> Found:
    routes = jln.explain(fused, *args)
    names = [route.layer for route in routes if route.path != "plain"]
    return Found(
        norms=sum(2 if OPERATORS[name.removeprefix("jln.")].both_sides else 1 for name in names),
        sums=sum("add" in name for name in names),
        linears=sum(name.endswith("_linear") for name in names),
        left=len(routes) - len(names),
    )


def held(function: Callable[[Any, Any], Any], parameters: Any, x: Any) -> int:
    """The bytes that are kept between forward and backward, beside the parameters and x."""

    def pulling(parameters: Any, x: Any) -> Any:
        return jax.vjp(function, parameters, x)[1]

    program = jax.make_jaxpr(pulling)(parameters, x).jaxpr
    given = {*program.invars}
    kept = dict.fromkeys(v for v in program.outvars if not isinstance(v, Literal) and v not in given)
    return sum(v.aval.size * jnp.dtype(v.aval.dtype).itemsize for v in kept)
