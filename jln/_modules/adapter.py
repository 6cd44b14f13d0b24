"""The adapter of a framework: what is asked of it, and the way from its layers' calls to operators or its own code."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax

from jln import _checks
from jln._explain import Route, into, listening, note
from jln._junction.arrays import Arrays
from jln._modules.norms import Linear, Prepared
from jln._operators.eight_bits import Quantize, Scaled


class Inputs(NamedTuple):
    """The arrays that a module's call reads: x, the residual that is added to it, and their sum, or x alone.

    The operators add up for themselves; a sum that nothing reads is not in a compiled program.
    """

    x: Any
    residual: Any
    total: Any

    def read_by(self, norm: Prepared, reads_as_given: bool) -> tuple[Arrays, str]:
        """Return the arrays that the operator takes for `norm` of the total, and why.

        reads_as_given: whether the norm's x is the total, but for a cast.
        """
        if self.residual is not None and not (reads_as_given and norm.x.dtype == self.total.dtype):
            return Arrays(norm.x), "but for the sum of x and the residual: the norm promotes what it reads"
        x = norm.x if self.residual is None else self.x
        return Arrays(x, self.residual), "all arguments are the operator's"

    def result(self, y: Any, total: jax.Array | None = None) -> Any:
        """The result as the modules' users get it: y, or (y, total) of a sum, which the operator may have made."""
        return y if self.residual is None else (y, self.total if total is None else total)


def inputs_of(x: Any, residual: Any) -> Inputs:
    """The arrays of a call, checked where there is a residual: without one what is wrong is the framework's to say."""
    if residual is None:
        return Inputs(x, None, x)
    x, residual = _checks.array("x", x), _checks.array("residual", residual)
    _checks.shape("residual", residual, x.shape, "that of x")
    dtype = _checks.promoted(x.dtype, residual.dtype)
    return Inputs(x, residual, x.astype(dtype) + residual.astype(dtype))


def axes(axis: int | Iterable[int]) -> tuple[int, ...]:
    """The axes as a tuple, where Flax takes an int too."""
    return tuple(axis) if isinstance(axis, Iterable) else (axis,)


class Adapter(abc.ABC):
    """The adapter of a framework: how its layers are read. Our modules hand their calls to `norm` and `linears`.

    `own` are the arguments that the framework's own call of a layer has beside x, by name: a mask.

    module: the name of our module.
    linear_name: what the framework calls a Linear.
    theirs: the framework's LayerNorm and RMSNorm, even where somebody puts ours in their place later.
    ours: our LayerNorm and RMSNorm.
    """

    module: ClassVar[str]
    linear_name: ClassVar[str] = "Linear"
    theirs: ClassVar[tuple[Any, Any]]
    ours: ClassVar[tuple[Any, Any]]

    @abc.abstractmethod
    def place(self, layer: Any) -> str:
        """The place of a layer in its model; "" where it is not known."""

    @abc.abstractmethod
    def prepared(self, layer: Any, x: Any, own: Mapping[str, Any]) -> Prepared | str:
        """A norm of x in the operators' terms, or the reason why they cannot compute it.

        It is the norm that is called, so that it may make its parameters here. Where a reason is returned it has not
        made them: that is for the framework's own code.
        """

    def existing(self, layer: Any, x: Any, own: Mapping[str, Any]) -> Prepared | str:
        """A norm as of `prepared`, whose parameters exist and are read without a call of it."""
        return self.prepared(layer, x, own)

    def linear(self, layer: Any, norm: Prepared, own: Mapping[str, Any]) -> Linear | str:
        """A Linear behind the norm in the operators' terms, or the reason why it cannot be."""
        raise NotImplementedError

    def obstacle(self, norm: Any) -> str | None:
        """The reason why a norm must be called; None where its parameters may be read without."""
        return None

    def reads_as_given(self, layer: Any) -> bool:
        """Tell whether a norm reads x as it is, but for a cast."""
        return True

    def is_layer_norm(self, layer: Any) -> bool:
        return isinstance(layer, self.theirs[0])

    def norm(self, layer: Any, x: Any, residual: Any, **own: Any) -> Any:
        """Compute the call of a norm, from within it."""
        inputs = inputs_of(x, residual)
        name, norm = self._name(layer), self.prepared(layer, inputs.total, own)
        if isinstance(norm, str):
            note(name, "plain", norm, inputs.total)
            cls = self.theirs[0 if self.is_layer_norm(layer) else 1]
            return inputs.result(cls.__call__(layer, inputs.total, **own))
        operands, why = inputs.read_by(norm, self.reads_as_given(layer))
        note(name, "norm", why, norm.x)
        results = norm.value(operands)
        return inputs.result(results.y, results.total)

    def linears(
        self,
        layer: Any,
        norm: Any,
        linears: Mapping[str, Any],
        x: Any,
        residual: Any,
        quantize: Quantize,
        *,
        several: bool,
        of_linears: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Any:
        """Compute the call of a norm with Linears, from within it: as one operator, or each called by itself.

        several: whether the result is a tuple. of_linears: arguments of the Linears.
        """
        inputs, of_linears = inputs_of(x, residual), of_linears or {}
        name = self._name(layer, f"{self._kind(norm)}{self.linear_name}")
        operator = self._fused(norm, linears, inputs, of_linears, own)
        if isinstance(operator, str) and quantize is not None:
            self._call_each(norm, linears, inputs, of_linears, own)
            operator = self._fused(norm, linears, inputs, of_linears, own, called=True)
        if not isinstance(operator, str):
            prepared, kernels = operator
            operands, why = inputs.read_by(prepared, self.reads_as_given(norm))
            note(name, "fused", why, prepared.x)
            results = prepared.linears(kernels, operands, quantize)
            y = results.y if several else results.y[0]
            return inputs.result(y if results.y_max is None else Scaled(y, results.y_max), results.total)
        if quantize is not None:
            raise ValueError(f"quantize={quantize!r} is of jln's operators, which cannot compute this call: {operator}")
        routes: list[Route] = []
        with listening(into(routes)):
            z = norm(inputs.total, **own)
        plain = [route for route in routes if route.path == "plain"]
        for route in plain or [Route(name, "norm" if routes else "plain", f"not fused: {operator}")]:
            note(*route, z)
        # Only arrays pass between layers that are called, for a framework may show each call to its users.
        ys = tuple(linear(z, **of_linears) for linear in linears.values())
        return inputs.result(ys if several else ys[0])

    def _call_each(
        self, norm: Any, linears: Mapping[str, Any], inputs: Inputs, of_linears: Mapping, own: Mapping
    ) -> None:
        """Call the layers for their parameters, which they may have to make, and for who watches them."""
        with listening(into([])):
            z = norm(inputs.total, **own)
        for linear in linears.values():
            linear(z, **of_linears)

    def _fused(
        self,
        norm: Any,
        linears: Mapping[str, Any],
        inputs: Inputs,
        of_linears: Mapping,
        own: Mapping,
        called: bool = False,
    ) -> tuple[Prepared, list[Linear]] | str:
        """A norm and Linears in the operators' terms, or the reason why they cannot be one operator.

        No layer is called here: nobody sees half a result. called: whether all have been.
        """
        if not called and (obstacle := self.obstacle(norm)) is not None:
            return obstacle
        if type(norm).__call__ not in [cls.__call__ for cls in (*self.ours, *self.theirs)]:
            return "the norm has a call of its own"
        prepared = self.existing(norm, inputs.total, own)
        if isinstance(prepared, str):
            return prepared
        kernels: list[Linear] = []
        for name, layer in linears.items():
            linear = self.linear(layer, prepared, of_linears)
            obstacle = linear if isinstance(linear, str) else prepared.linear_obstacle(linear)
            if isinstance(linear, str) or obstacle is not None:
                return f"{name}: {obstacle}" if len(linears) > 1 else str(obstacle)
            kernels.append(linear)
        if any(a.precision != kernels[0].precision for a in kernels):
            return "the Linears differ in precision"
        return prepared, kernels

    def _kind(self, norm: Any) -> str:
        return "LayerNorm" if self.is_layer_norm(norm) else "RMSNorm"

    def _name(self, layer: Any, kind: str | None = None) -> str:
        """The name under which `explain` lists a layer: its class, and its place where that is known."""
        return f"{self.module}.{kind or self._kind(layer)} {self.place(layer)}".rstrip()


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
