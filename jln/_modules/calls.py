"""The way from a module's call to the operator, or to the framework's own code, with a note of which and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jln import _checks
from jln._explain import Route, into, listening, note
from jln._junction.arrays import Arrays
from jln._modules.arguments import AS_GIVEN, Inputs, Products
from jln._modules.norms import Linear, Prepared


def named(argument: str, linears: Mapping[Any, Any], cls: type, taken: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The arguments of each of several Linears, by the Linear's name and in order.

    argument: the name of the argument of `cls` in which the Linears were given, which is an argument of a Linear too.
    linears: by name, the value of that argument for a Linear, or a mapping of the Linear's own arguments.
    taken: names that no Linear may have, and of which the class does not know.
    """
    if not linears:
        raise ValueError(f"{argument} must name at least one Linear; got {dict(linears)}")
    for name in linears:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must name each Linear with a str; got {name!r}")
        if not name.isidentifier() or name in taken or hasattr(cls, name):
            raise ValueError(
                f"{argument} cannot name a Linear {name!r}, which is no identifier or another's name in {cls.__name__}"
            )
        if isinstance(own := linears[name], Mapping) and argument not in own:
            raise TypeError(f"{argument} of the Linear {name!r} must be among its own arguments; got {dict(own)}")
    return {name: dict(a) if isinstance(a, Mapping) else {argument: a} for name, a in linears.items()}


class Fused(NamedTuple):
    """A norm and Linears that are one operator. why: the reason for this path. read: the array that the norm reads."""

    compute: Callable[[], Products]
    why: str
    read: Any


def fused(
    norm: Prepared, linears: Mapping[str, Linear | str], inputs: Inputs, reads_as_given: bool = True
) -> Fused | str:
    """`norm` of the total and the Linears behind it as one operator, or the reason why they cannot be one.

    linears: by name, each in the operators' terms, or the reason why it cannot be.
    reads_as_given: as of `Inputs.read_by`.
    """
    known: list[Linear] = []
    for name, linear in linears.items():
        obstacle = linear if isinstance(linear, str) else norm.linear_obstacle(linear)
        if isinstance(linear, str) or obstacle is not None:
            return f"{name}: {obstacle}" if len(linears) > 1 else str(obstacle)
        known.append(linear)
    if any(a.precision != known[0].precision for a in known):
        return "the Linears differ in precision"
    read, why = inputs.read_by(norm, reads_as_given)

    def compute() -> Products:
        results = norm.linears(known, read)
        return results.y, inputs.total if results.total is None else results.total

    return Fused(compute, why, norm.x)


Parameter = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def prepare(
    x: Any,
    scale: Parameter | None,
    offset: Parameter | None,
    *,
    axes: Sequence[int],
    parameter_axes: Sequence[int] | None = None,
    epsilon: Any,
    subtract_mean: bool,
    y_dtype: Any,
) -> Prepared | str:
    """The norm of `x` in the operators' terms, or the reason why they cannot compute it.

    scale, offset: where they are not known yet, their shapes and dtypes, to be replaced by `with_parameters`.
    axes: the normalised axes, in any order, negative ones counted from the end. What is wrong with them, or with any
      other argument, is for the framework to say.
    parameter_axes: the axes over which the parameters are spread, in ascending order. None: they broadcast against x.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        return f"x is a {type(x).__name__}, not an array"
    x = jnp.asarray(x)
    if x.size == 0:
        return "x is empty"
    positive = sorted({a + x.ndim if a < 0 else a for a in axes})
    if not positive or not all(0 <= a < x.ndim for a in positive):
        return f"x of shape {x.shape} has no axes {tuple(axes)}"
    if not _checks.is_number(epsilon) or not 0 <= epsilon < math.inf:
        return f"epsilon is {epsilon!r}, not a static number that is finite and not negative"
    if (fault := _checks.too_large(float(epsilon), x.dtype)) is not None:
        return fault
    spread: dict[str, Any] = {"scale": scale, "offset": offset}
    for name, a in spread.items():
        if a is None:
            continue
        shape = _shape_against(x.shape, a.shape, parameter_axes)
        if shape is None:
            return f"{name} of shape {a.shape} does not fit x of shape {x.shape}"
        if any(shape[i] != 1 for i in range(x.ndim) if i not in positive):
            return f"{name} varies along axes that are not normalised"
        spread[name] = _reshaped(a, shape)
    dtypes = [jnp.dtype(d) for d in (x.dtype, y_dtype, *(a.dtype for a in spread.values() if a is not None))]
    for dtype in dtypes:
        if dtype not in _checks.DTYPES or dtype != jax.dtypes.canonicalize_dtype(dtype):
            return f"{dtype} is not a dtype of the operators"
    if jnp.float64 in dtypes and len(set(dtypes)) > 1:
        return f"float64 with {min(dtypes, key=lambda d: d.itemsize)}: some of it would lose float64's digits"
    return Prepared(
        x, **spread, axes=tuple(positive), epsilon=float(epsilon), subtract_mean=subtract_mean, dtype=jnp.dtype(y_dtype)
    )


def _reshaped(a: Parameter, shape: tuple[int, ...]) -> Parameter:
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, a.dtype)
    return jnp.asarray(a).reshape(shape)


def _shape_against(
    x: tuple[int, ...], parameter: tuple[int, ...], axes: Sequence[int] | None
) -> tuple[int, ...] | None:
    """The shape of x's rank with which a parameter broadcasts against x; None where there is none."""
    if axes is None:
        shape = (1,) * (len(x) - len(parameter)) + parameter
        fits = len(shape) == len(x) and all(n in (1, m) for n, m in zip(shape, x, strict=True))
        return shape if fits else None
    axes = [a + len(x) if a < 0 else a for a in axes]
    if not all(0 <= a < len(x) for a in axes):
        return None
    shape = tuple(n if i in axes else 1 for i, n in enumerate(x))
    return shape if math.prod(shape) == math.prod(parameter) else None


def compute_norm(
    layer: str, norm: Prepared | str, inputs: Inputs, plain: Callable[[Any], Any], reads_as_given: bool = True
) -> Any:
    """A norm's result: by the operators if `norm` is prepared, else by `plain`, the framework's own code."""
    if inputs.gated is not None:
        return _of_gated(layer, norm, inputs.gated, plain)
    if inputs.added_to is not None:
        return _added(layer, norm, inputs.total, inputs.added_to, plain)
    if isinstance(norm, str):
        return inputs.result(((run_plain(layer, norm, inputs.total, lambda: plain(inputs.total)),), inputs.total))
    read, why = inputs.read_by(norm, reads_as_given)
    note(layer, "norm", why, norm.x)
    results = norm.value(read)
    return inputs.result(((results.y,), inputs.total if results.total is None else results.total))


def _of_gated(layer: str, norm: Prepared | str, gated: Arrays, plain: Callable[[Any], Any]) -> jax.Array:
    if isinstance(norm, Prepared) and norm.offset is not None:
        norm = "the norm has an offset, and the gated operator has none"
    if isinstance(norm, Prepared):
        note(layer, "norm", AS_GIVEN, norm.x)
        return norm.value(gated._replace(x=norm.x)).y
    note(layer, "plain", norm, gated.x)

    def times_silu(a: jax.Array) -> jax.Array:
        """`a * silu(z)`, rounded to a's dtype as between the framework's own layers."""
        wide = _checks.promoted(a.dtype, jnp.float32)
        z = gated.x_z if gated.z is None else gated.z
        return (a.astype(wide) * jax.nn.silu(z.astype(wide))).astype(a.dtype)

    return plain(times_silu(gated.x)) if gated.z is None else times_silu(plain(gated.x))


def _added(layer: str, norm: Prepared | str, x: jax.Array, to: jax.Array, plain: Callable[[Any], Any]) -> jax.Array:
    if isinstance(norm, Prepared):
        note(layer, "norm", AS_GIVEN, norm.x)
        return norm.value(Arrays(norm.x, added=to)).y
    return _promoted_sum(to, run_plain(layer, norm, x, lambda: plain(x)))


def _promoted_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = _checks.promoted(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


def pair(
    layer: str,
    inputs: Inputs,
    norm: Any,
    cls: type,
    prepare: Callable[[Any, Any], Prepared | str],
    apart: Callable[[jax.Array], Any],
    reads_as_given: bool = True,
) -> tuple[Any, jax.Array]:
    """Compute `(norm(total), total)` with `total = residual + x_norm(x)`: as one operator, or each norm by itself.

    cls: the class that `x_norm` must have.
    prepared: from a norm and the array that it reads to the norm in the operators' terms.
    apart: `norm` of the total.
    """
    assert inputs.addends is not None
    x, residual = inputs.addends.x, inputs.addends.residual
    if not isinstance(inputs.x_norm, cls):
        got = type(inputs.x_norm)
        raise TypeError(f"x_norm must be a {cls.__module__}.{cls.__name__}; got a {got.__name__} of {got.__module__}")
    called_as_ours = type(inputs.x_norm).__call__ is cls.__call__
    in_front = prepare(inputs.x_norm, x) if called_as_ours else "x_norm has a call of its own"
    if isinstance(in_front, Prepared):  # the residual has the total's shape, and that is all that is asked
        behind = prepare(norm, residual.astype(in_front.dtype_added_to(residual)))
        why = _pair_obstacle(in_front, behind, residual, reads_as_given)
        if isinstance(behind, Prepared) and why is None:
            note(layer, "norm", f"{AS_GIVEN}, those of x_norm too", x)
            assert isinstance(behind, Prepared)
            return in_front.followed_by(behind, residual)
    else:
        why = in_front
    total = inputs.x_norm(x, added_to=residual) if called_as_ours else _promoted_sum(residual, inputs.x_norm(x))
    own: list[Route] = []
    with listening(into(own)):
        y = apart(total)
    for route in own:
        note(*route[:2], f"not one operator with x_norm: {why}" if route.path == "norm" else route.why, x)
    return y, total


def _pair_obstacle(first: Prepared, second: Prepared | str, residual: jax.Array, reads_as_given: bool) -> str | None:
    """The reason why two norms, the second of the residual plus the first, cannot be one operator; None: they can."""
    if isinstance(second, str):
        return second
    if any(norm.subtract_mean or norm.offset is not None for norm in (first, second)):
        return "one of the two subtracts a mean or has an offset"
    if first.axes != second.axes:
        return f"the two differ in axes: {first.axes} and {second.axes}"
    if first.epsilon != second.epsilon:
        return f"the two differ in epsilon: {first.epsilon:g} and {second.epsilon:g}"
    total = first.dtype_added_to(residual)
    if _checks.promoted(first.x.dtype, residual.dtype) != total:
        return f"x is {first.x.dtype}, the residual {residual.dtype}, their sum behind the norm {total}"
    if not reads_as_given or second.x.dtype != total:
        return "the norm promotes what it reads"
    return None


def run_plain(layer: str, why: str, read: Any, plain: Callable[[], Any]) -> Any:
    """Run `plain`, the framework's own code, and note the reason `why`."""
    note(layer, "plain", why, read)
    return plain()


def compute_layers(
    layer: str, operator: Fused | str, norm: Callable[[], Any], linears: Callable[[Any], Products]
) -> Products:
    """Compute a norm and the Linears behind it: as one operator, or each called by itself for the reason `operator`.

    Only arrays pass between the layers, for a framework may show each call to its users.
    """
    if isinstance(operator, Fused):
        note(layer, "fused", operator.why, operator.read)
        return operator.compute()
    taken: list[Route] = []
    with listening(into(taken)):
        z = norm()
    own = [route for route in taken if route.path == "plain"]
    for route in own or [Route(layer, "norm" if taken else "plain", f"not fused: {operator}")]:
        note(*route, z)
    return linears(z)
