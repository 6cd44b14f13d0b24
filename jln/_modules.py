"""What the modules share: a framework's call put in the operators' terms, or the reason why it cannot be.

A module overrides nothing of its framework's class but the call. It describes the call to `prepared`, which answers
with a `Deferred` norm, ready for the operators, or with a sentence that says why the framework's own code must run.
Every call notes the answer, and so `explain` tells what a call does by making one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jln import _checks
from jln._norm.arguments import Gate, Given, checked_arrays
from jln._norm.operator import normalised
from jln._norm.signature import Results
from jln._norm_add_norm.operator import rms_norm_add_rms_norm
from jln._norm_linear.operator import normalised_linear
from jln._routes import Route, listening, note


def missing(module: str, framework: str, extra: str) -> str:
    """The message of a module's ImportError."""
    return f'{module} needs {framework}: pip install "jln[{extra}]"'


@dataclasses.dataclass(frozen=True)
class NormCall:
    """A norm in the operators' terms.

    axes: not negative, ascending. shapes: of x, scale and offset as they were when the norm was called.
    """

    axes: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    epsilon: float
    subtract_mean: bool
    y_dtype: jnp.dtype

    @property
    def name(self) -> str:
        return "LayerNorm" if self.subtract_mean else "RMSNorm"


def no_array(deferred: object) -> TypeError:
    return TypeError(f"{deferred!r} is no array: only the Linear with which the norm was fused can read it")


class NoArray:
    """A norm's result that is not there yet: it has the sizes of the norm's input `x`, and no numbers."""

    x: jax.Array

    def __repr__(self) -> str:
        return f"Deferred({self.x.dtype}{list(self.x.shape)}, a norm left to the Linear with which it was fused)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "x":  # a protocol's name, or of an object that is being made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        raise _NoSuchAttribute(str(no_array(self)))

    @property
    def __jax_array__(self) -> Any:
        raise no_array(self)  # a method that JAX could call would not be called everywhere

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def ndim(self) -> int:
        return self.x.ndim


class _NoSuchAttribute(TypeError, AttributeError):
    """What `hasattr` takes for its answer, and who wants the numbers for `no_array`."""


def _refuse(deferred: Any, *_: Any, **__: Any) -> NoReturn:
    raise no_array(deferred)


# What Python, NumPy and JAX ask for numbers by. Python's own answers, as False of `z == y`, would count as numbers.
_CONVERSIONS = "array bool int float complex index round floor ceil trunc hash len iter contains getitem setitem"
_OPERATORS = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OF_ONE = "neg pos abs invert eq ne lt le gt ge"
for _name in (*_CONVERSIONS.split(), *_OF_ONE.split(), *_OPERATORS.split(), *(f"r{n}" for n in _OPERATORS.split())):
    setattr(NoArray, f"__{_name}__", _refuse)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "scale", "offset"], meta_fields=["call"])
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Deferred(NoArray):
    """A norm that has not been computed yet, because the Linear behind it may do that. Its sizes and its dtype are
    known; who wants its numbers gets a TypeError.

    scale, offset: of x's rank, with 1 on the axes that are not normalised; or None.
    """

    x: jax.Array
    scale: jax.Array | None
    offset: jax.Array | None
    call: NormCall

    @property
    def dtype(self) -> jnp.dtype:
        return self.call.y_dtype

    def with_parameters(self, scale: jax.Array | None, offset: jax.Array | None) -> Deferred:
        """In place of stand-ins of the same sizes."""
        given = ((scale, self.scale), (offset, self.offset))
        scale, offset = (None if a is None or like is None else a.reshape(like.shape) for a, like in given)
        return dataclasses.replace(self, scale=scale, offset=offset)

    def value(self, read: Given | None = None, norm_before_gate: bool = True) -> Results:
        """The norm by itself, of x or of what is read in its place: addends, x and z, or x and what y is added to."""
        n = self.call
        read = Given(self.x) if read is None else read
        dtype = n.y_dtype if read.added is None else self.dtype_added_to(read.added)
        options = {"epsilon": n.epsilon, "subtract_mean": n.subtract_mean, "dtype": dtype}
        options |= {"norm_before_gate": norm_before_gate}
        return normalised(self._with_own(read), axis=n.axes, **options)

    def dtype_added_to(self, residual: jax.Array) -> jnp.dtype:
        """Of the sum of the norm's result and this."""
        return jnp.promote_types(residual.dtype, self.dtype)

    def followed_by(self, norm: Deferred, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`norm` of `residual +` this norm as one operator, which nothing must keep from being one. -> (y, total)"""
        scales = self._parameter(self.scale), norm._parameter(norm.scale)
        n = {"axis": self.call.axes, "epsilon": self.call.epsilon, "dtype": norm.dtype, "forward_mode": True}
        return rms_norm_add_rms_norm(self.x, residual, *scales, **n)

    def linears(self, linears: Sequence[Linear], read: Given) -> Any:
        """The norm of what is read, x or addends, and the Linears as one operator, which nothing must keep from being
        one. -> the products, and of addends the total.
        """
        n = self.call
        return normalised_linear(
            self._with_own(read),
            tuple(a.kernel.astype(n.y_dtype) for a in linears),
            tuple(None if a.bias is None else a.bias.astype(n.y_dtype) for a in linears),
            epsilon=n.epsilon,
            subtract_mean=n.subtract_mean,
            precision=linears[0].precision,
        )

    def _with_own(self, read: Given) -> Given:
        return read._replace(scale=self._parameter(self.scale), offset=self._parameter(self.offset))

    def _parameter(self, a: jax.Array | None) -> jax.Array | None:
        """In the shape of the normalised axes."""
        if a is None:
            return None
        axes = self.call.axes
        normalised_shape = tuple(self.x.shape[i] for i in axes)
        a = a.reshape([a.shape[i] for i in axes])
        if a.shape != normalised_shape:  # its gradient is a sum, which 16 bits would round again and again
            a = jnp.broadcast_to(a.astype(jnp.promote_types(a.dtype, jnp.float32)), normalised_shape)
        return a

    def linear_obstacle(self, kernel_shape: tuple[int, ...], product_dtype: Any) -> str | None:
        """Why a Linear that multiplies in `product_dtype` cannot be fused with the norm; None where it can."""
        if self.call.axes != (self.x.ndim - 1,):
            return "the norm is not over the last axis"
        if len(kernel_shape) < 2 or kernel_shape[0] != self.x.shape[-1]:
            return "the kernel does not have the shape that the last axis asks for"
        if self.dtype != product_dtype or jnp.promote_types(self.x.dtype, product_dtype) != product_dtype:
            dtypes = f"x is {self.x.dtype}, the norm's result {self.dtype}, the product {jnp.dtype(product_dtype)}"
            return f"{dtypes}: one operator would round differently"
        return None


class Linear(NamedTuple):
    """A Linear in the operators' terms. dtype: in which it multiplies."""

    kernel: jax.Array
    bias: jax.Array | None
    dtype: Any
    precision: Any


def named(argument: str, linears: Mapping[Any, Any], cls: type, taken: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The arguments of each of several Linears, by name and in order.

    argument: of `cls`, that they were given as; it is a Linear's too. Each value is its value for that Linear, or a
      mapping of this Linear's own arguments. taken: names of which the class does not know.
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


AS_GIVEN = "all arguments are the operator's"


class Gated(NamedTuple):
    """What silu of `z` multiplies: the norm's result, or x."""

    z: jax.Array
    norm_before_gate: bool


class Summed(NamedTuple):
    """What is normalised, and where it is a sum its addends, as the operators take them; or x, and its gate, or what
    the norm's result is added to. With an `x_norm`, which must be called first, there are addends and no total yet.
    """

    total: Any
    addends: Given | None = None
    gated: Gated | None = None
    added_to: jax.Array | None = None
    x_norm: Any = None

    def read_by(self, norm: Deferred, reads_as_given: bool) -> tuple[Given, str]:
        """What the operator is given for `norm` of the total, and why.

        reads_as_given: whether the norm's x is the total, but for a cast.
        """
        if self.addends is None:
            return Given(norm.x), AS_GIVEN
        if not reads_as_given or norm.x.dtype != self.total.dtype:
            return Given(norm.x), "but for the sum of x and the residual: the norm promotes what it reads"
        return self.addends, AS_GIVEN

    def result(self, products: Products, several: bool = False) -> Any:
        """As the modules' users have it."""
        ys, total = products
        y = ys if several else ys[0]
        return y if self.addends is None else (y, total)


def summed(x: Any, residual: Any, x_bias: Any, gate: Gate, over: int | Iterable[int] = -1) -> Summed:
    """`residual + gate * (x + x_bias)`, or `x` where there is no residual.

    x_bias, gate: as of `jln.add_layer_norm`, with the normalised axes in ascending order. over: these.

    Raises:
      TypeError: a residual is given, and an array is none or has an unsupported dtype.
      ValueError: the residual or what goes with it does not fit `x`, or there is no residual with which it goes.
    """
    if residual is None:
        for name, a in (("x_bias", x_bias), ("gate", gate)):
            if a is not None:
                raise ValueError(f"{name} needs a residual, to which x is added with it; got residual=None")
        return Summed(x)
    x = _checks.array("x", x)
    order = tuple(sorted({a + x.ndim if a < 0 else a for a in axes(over)}))
    addends = checked_arrays(order, x=x, residual=residual, x_bias=x_bias, gate=gate)
    dtype = jnp.promote_types(x.dtype, addends.residual.dtype)
    # The operators add up for themselves; a sum that nothing reads is not in a compiled program.
    return Summed(_sum(addends, order, dtype).astype(dtype), addends)


def taken(
    x: Any,
    over: int | Iterable[int],
    *,
    residual: Any = None,
    x_bias: Any = None,
    gate: Gate = None,
    added_to: Any = None,
    x_norm: Any = None,
    z: Any = None,
    norm_before_gate: bool = True,
) -> Summed:
    """As `summed`, of all that a norm by itself may take.

    z, norm_before_gate: as of `jln.rms_norm_gated`. added_to: to which the norm's result is. x_norm: a norm of x, whose
      result is added to the residual.

    Raises:
      TypeError: an array is none or has an unsupported dtype; or `norm_before_gate` is no bool.
      ValueError: an array does not fit `x`, or something is given with or without what it goes with.
    """
    of_x = {"x_bias": x_bias, "gate": gate}
    if not _checks.flag("norm_before_gate", norm_before_gate) and z is None:
        raise ValueError("norm_before_gate=False needs a z, whose silu multiplies x; got z=None")
    _go_without("added_to", added_to, "the norm's result is added", residual=residual, x_norm=x_norm, z=z, **of_x)
    _go_without("x_norm", x_norm, "its result is added to the residual", z=z, **of_x)
    _go_without("z", z, "the sum is not gated", residual=residual, **of_x)
    if x_norm is not None:
        if residual is None:
            raise ValueError("x_norm needs a residual, to which its result is added; got residual=None")
        return Summed(None, checked_arrays((), x=x, residual=residual), x_norm=x_norm)
    if added_to is not None:
        x, added_to = _checks.array("x", x), _checks.array("added_to", added_to)
        _checks.shape("added_to", added_to, x.shape, "that of x")
        return Summed(x, added_to=added_to)
    if z is not None:
        given = checked_arrays((), x=x, z=z)
        return Summed(given.x, gated=Gated(given.z, bool(norm_before_gate)))
    return summed(x, residual, x_bias, gate, over)


def _go_without(name: str, given: Any, why: str, **others: Any) -> None:
    for other, a in others.items():
        if given is not None and a is not None:
            raise ValueError(f"{name} goes without {other}: {why}")


def _sum(addends: Given, order: tuple[int, ...], dtype: Any) -> jax.Array:
    """Of more than two as wide as the operators make it."""
    x, bias, gate = addends.x, addends.x_bias, addends.gate
    if bias is None and gate is None:
        return x.astype(dtype) + addends.residual.astype(dtype)

    def spread(a: jax.Array) -> jax.Array:
        a = a.astype(wide)
        return a if a.ndim == x.ndim else jnp.expand_dims(a, [i for i in range(x.ndim) if i not in order])

    wide = jnp.promote_types(dtype, jnp.float32)
    branch = x.astype(wide) if bias is None else x.astype(wide) + spread(bias)
    return addends.residual.astype(wide) + (branch if gate is None else spread(gate) * branch)


Products = tuple[tuple[Any, ...], Any]  # of each Linear, and the total


class Fused(NamedTuple):
    """A norm and Linears that are one operator. why: this is the path."""

    compute: Callable[[], Products]
    why: str


def fused(
    norm: Deferred, linears: Mapping[str, Linear | str], given: Summed, reads_as_given: bool = True
) -> Fused | str:
    """`norm`, of the total, and the Linears behind it as one operator, or why they cannot be one.

    linears: by name, each in the operators' terms, or why it cannot be. reads_as_given: as of `Summed.read_by`.
    """
    known: list[Linear] = []
    for name, linear in linears.items():
        obstacle = linear if isinstance(linear, str) else norm.linear_obstacle(linear.kernel.shape, linear.dtype)
        if isinstance(linear, str) or obstacle is not None:
            return f"{name}: {obstacle}" if len(linears) > 1 else str(obstacle)
        known.append(linear)
    if any(a.precision != known[0].precision for a in known):
        return "the Linears differ in precision"
    read, why = given.read_by(norm, reads_as_given)
    if read.residual is not None:
        return Fused(lambda: norm.linears(known, read), why)
    return Fused(lambda: (norm.linears(known, read), given.total), why)


Parameter = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def prepared(
    x: Any,
    scale: Parameter | None,
    offset: Parameter | None,
    *,
    axes: Sequence[int],
    parameter_axes: Sequence[int] | None = None,
    epsilon: Any,
    subtract_mean: bool,
    y_dtype: Any,
) -> Deferred | str:
    """The norm of `x` in the operators' terms, or why they cannot compute it.

    scale, offset: where they are not known yet, their shapes and dtypes, to be replaced by `with_parameters`.
    axes: to normalise over, in any order, negative ones counted from the end; what is wrong with them is for the
      framework to say, and so for every other argument. parameter_axes: the parameters are spread over these, in
        ascending order; None: they broadcast against x as they are.
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
    shapes = _shapes(x, *spread.values())
    call = NormCall(tuple(positive), shapes, float(epsilon), subtract_mean, jnp.dtype(y_dtype))
    return Deferred(x, **spread, call=call)


def axes(given: int | Iterable[int]) -> tuple[int, ...]:
    """As a tuple, where Flax takes one by itself too."""
    return tuple(given) if isinstance(given, Iterable) else (given,)


def _shapes(*arrays: Parameter | None) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(None if a is None else a.shape for a in arrays)


def _reshaped(a: Parameter, shape: tuple[int, ...]) -> Parameter:
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, a.dtype)
    return jnp.asarray(a).reshape(shape)


def _shape_against(
    x: tuple[int, ...], parameter: tuple[int, ...], axes: Sequence[int] | None
) -> tuple[int, ...] | None:
    """The shape of x's rank with which a parameter broadcasts against it; None where there is none."""
    if axes is None:
        shape = (1,) * (len(x) - len(parameter)) + parameter
        fits = len(shape) == len(x) and all(n in (1, m) for n, m in zip(shape, x, strict=True))
        return shape if fits else None
    axes = [a + len(x) if a < 0 else a for a in axes]
    if not all(0 <= a < len(x) for a in axes):
        return None
    shape = tuple(n if i in axes else 1 for i, n in enumerate(x))
    return shape if math.prod(shape) == math.prod(parameter) else None


def computed(
    layer: str, found: Deferred | str, given: Summed, plain: Callable[[Any], Any], reads_as_given: bool = True
) -> Any:
    """A norm's result: by what was prepared, or by the framework's own code from the total."""
    if given.gated is not None:
        return _of_gated(layer, found, given.total, given.gated, plain)
    if given.added_to is not None:
        return _added(layer, found, given.total, given.added_to, plain)
    if isinstance(found, str):
        return given.result(((deferred(layer, found, lambda: plain(given.total)),), given.total))
    read, why = given.read_by(found, reads_as_given)
    note(layer, "norm", why)
    y, total = found.value(read)
    return given.result(((y,), given.total if total is None else total))


def _of_gated(layer: str, found: Deferred | str, x: jax.Array, of: Gated, plain: Callable[[Any], Any]) -> jax.Array:
    if isinstance(found, Deferred) and found.offset is not None:
        found = "the norm has an offset, and the gated operator has none"
    if isinstance(found, Deferred):
        note(layer, "norm", AS_GIVEN)
        return found.value(Given(found.x, z=of.z), of.norm_before_gate).y
    note(layer, "plain", found)
    u = jax.nn.silu(of.z.astype(jnp.promote_types(x.dtype, jnp.float32)))
    if not of.norm_before_gate:
        return plain((x * u).astype(x.dtype))
    y = plain(x)
    return (y * u).astype(y.dtype)


def _added(layer: str, found: Deferred | str, x: jax.Array, to: jax.Array, plain: Callable[[Any], Any]) -> jax.Array:
    if isinstance(found, Deferred):
        note(layer, "norm", AS_GIVEN)
        return found.value(Given(found.x, added=to)).y
    return _promoted_sum(to, deferred(layer, found, lambda: plain(x)))


def _promoted_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


def pair(
    layer: str,
    given: Summed,
    norm: Any,
    cls: type,
    prepared: Callable[[Any, Any], Deferred | str],
    apart: Callable[[jax.Array], Any],
    reads_as_given: bool = True,
) -> tuple[Any, jax.Array]:
    """`(norm(total), total)` with `total = residual + x_norm(x)`: as one operator, or each norm for itself.

    cls: of `x_norm`. prepared: of a norm, and what it reads. apart: `norm`, of the total.
    """
    assert given.addends is not None
    x, residual = given.addends.x, given.addends.residual
    if not isinstance(given.x_norm, cls):
        got = type(given.x_norm)
        raise TypeError(f"x_norm must be a {cls.__module__}.{cls.__name__}; got a {got.__name__} of {got.__module__}")
    called_as_ours = type(given.x_norm).__call__ is cls.__call__
    found = prepared(given.x_norm, x) if called_as_ours else "x_norm has a call of its own"
    if isinstance(found, Deferred):  # the residual has the total's shape, and that is all that is asked
        then = prepared(norm, residual.astype(found.dtype_added_to(residual)))
        why = _pair_obstacle(found, then, residual, reads_as_given)
        if isinstance(then, Deferred) and why is None:
            note(layer, "norm", f"{AS_GIVEN}, those of x_norm too")
            return found.followed_by(then, residual)
    else:
        why = found
    total = given.x_norm(x, added_to=residual) if called_as_ours else _promoted_sum(residual, given.x_norm(x))
    own: list[Route] = []
    with listening((own,)):
        y = apart(total)
    for route in own:
        note(*route[:2], f"not one operator with x_norm: {why}" if route.path == "norm" else route.why)
    return y, total


def _pair_obstacle(first: Deferred, second: Deferred | str, residual: jax.Array, reads_as_given: bool) -> str | None:
    """Why two norms, the second of the residual plus the first, cannot be one operator; None where they can."""
    if isinstance(second, str):
        return second
    if any(norm.call.subtract_mean or norm.offset is not None for norm in (first, second)):
        return "one of the two subtracts a mean or has an offset"
    if first.call.axes != second.call.axes:
        return f"the two differ in axes: {first.call.axes} and {second.call.axes}"
    if first.call.epsilon != second.call.epsilon:
        return f"the two differ in epsilon: {first.call.epsilon:g} and {second.call.epsilon:g}"
    total = first.dtype_added_to(residual)
    if jnp.promote_types(first.x.dtype, residual.dtype) != total:
        return f"x is {first.x.dtype}, the residual {residual.dtype}, their sum behind the norm {total}"
    if not reads_as_given or second.x.dtype != total:
        return "the norm promotes what it reads"
    return None


def deferred(layer: str, found: Deferred | str, plain: Callable[[], Any]) -> Any:
    """Likewise for a Linear that knows what to do with a `Deferred`, and that will note the path."""
    if isinstance(found, str):
        note(layer, "plain", found)
        return plain()
    return found


def layers_computed(
    layer: str, found: Fused | str, norm: Callable[[], Any], linears: Callable[[Any], Products]
) -> Products:
    """What a norm and the Linears behind it compute: as one operator, or each called for itself because of `found`.

    Only arrays pass between the layers, for a framework may show each call to its users.
    """
    if isinstance(found, Fused):
        note(layer, "fused", found.why)
        return found.compute()
    taken: list[Route] = []
    with listening((taken,)):
        z = norm()
    own = [route for route in taken if route.path == "plain"]
    for route in own or [Route(layer, "norm" if taken else "plain", f"not fused: {found}")]:
        note(*route)
    return linears(z)


def linears_computed(layer: str, norm: Deferred, found: Fused | str, plain: Callable[[jax.Array], Any]) -> Products:
    """The Linears' results: of all as one operator, or by the framework's Linears behind jln's norm.

    Raises:
      TypeError: `norm` does not have the shapes of its call, for which its axes were meant.
    """
    if _shapes(norm.x, norm.scale, norm.offset) != norm.call.shapes:  # after a vmap, a scan, ... around the norm alone
        raise TypeError(f"the norm's result was transformed before the Linear read it: {norm!r}")
    if isinstance(found, str):
        note(layer, "norm", f"not fused: {found}")
        return plain(norm.value().y)
    note(layer, "fused", found.why)
    return found.compute()
