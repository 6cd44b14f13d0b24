"""The zoo: the shapes of blocks that people train, as small models in the framework that such models use.

Each is converted by one call, with everything that applies. The models know nothing of jln. Their sizes are those of
tests, `SMALL`, and for compiling, each client's `large`.
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

from jln import convert
from zoo import equinox_models, haiku_models, linen_models, nnx_models
from zoo.common import SMALL, Client, Size

__all__ = ["CLIENTS", "SMALL", "Client", "Functions", "Size", "functions", "held", "lines"]

CLIENTS: Mapping[str, Client] = (
    nnx_models.CLIENTS | linen_models.CLIENTS | haiku_models.CLIENTS | equinox_models.CLIENTS
)


class Functions(NamedTuple):
    """A model's function of parameters and x, and the converted one's.

    parameters, x: their shapes and dtypes. converted_parameters: those that the converted model makes by itself.
    """

    plain: Callable[[Any, Any], jax.Array]
    converted: Callable[[Any, Any], jax.Array]
    parameters: Any
    converted_parameters: Any
    x: jax.ShapeDtypeStruct


def lines(client: Client) -> int:
    """The number of lines that a user changes: the call, and for each of the model's own norms a recipe."""
    return 1 + len(client.recipes)


def functions(client: Client, size: Size, *, fuse: bool = True) -> Functions:
    x = jax.ShapeDtypeStruct(size.shape, size.dtype)
    return Functions(*_OF[client.framework](client, size, x, fuse), x)


def _of_nnx(client: Client, size: Size, _: Any, fuse: bool) -> tuple:
    model = nnx.eval_shape(lambda: client.model(size))
    conversion = convert.nnx(model, copy=True, fuse=fuse, norms=client.recipes)

    def of(model: Any) -> tuple[Callable, Any]:
        graph, state = nnx.split(model)
        return lambda state, x: nnx.merge(graph, state)(x), state

    (plain, state), (converted, own) = of(model), of(conversion.model)
    return plain, converted, state, own


def _of_equinox(client: Client, size: Size, _: Any, fuse: bool) -> tuple:
    model = eqx.filter_eval_shape(client.model, size)
    conversion = convert.equinox(model, fuse=fuse, norms=client.recipes)

    def of(model: Any) -> tuple[Callable, Any]:
        arrays, rest = eqx.partition(model, lambda a: isinstance(a, jax.ShapeDtypeStruct))
        leaves, tree = jax.tree.flatten(arrays)
        return lambda leaves, x: eqx.combine(tree.unflatten(leaves), rest)(x), leaves

    (plain, leaves), (converted, own) = of(model), of(conversion.model)
    return plain, converted, leaves, own


def _of_transformed(context: Callable) -> Callable[[Client, Size, Any, bool], tuple]:
    def of(client: Client, size: Size, x: Any, fuse: bool) -> tuple:
        model: nn.Module | hk.Transformed = client.model(size)

        def converted(parameters: Any, x: Any) -> jax.Array:
            with context(fuse=fuse, norms=client.recipes):
                return model.apply(parameters, x)

        def init(key: jax.Array, x: Any) -> Any:
            return model.init(key, x)

        key = jax.random.key(0)
        parameters = jax.eval_shape(init, key, x)
        with context(fuse=fuse, norms=client.recipes):
            return model.apply, converted, parameters, jax.eval_shape(lambda *args: init(*args), key, x)

    return of


_OF = {
    "nnx": _of_nnx,
    "equinox": _of_equinox,
    "linen": _of_transformed(convert.linen),
    "haiku": _of_transformed(convert.haiku),
}


def held(function: Callable[[Any, Any], Any], parameters: Any, x: Any) -> int:
    """The bytes that are kept between forward and backward, beside the parameters and x."""

    def pulling(parameters: Any, x: Any) -> Any:
        return jax.vjp(function, parameters, x)[1]

    program = jax.make_jaxpr(pulling)(parameters, x).jaxpr
    given = {*program.invars}
    kept = dict.fromkeys(v for v in program.outvars if not isinstance(v, Literal) and v not in given)
    return sum(v.aval.size * jnp.dtype(v.aval.dtype).itemsize for v in kept)
