"""The adapter of a framework: what is asked of it, and the way from its layers' calls to operators or its own code."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax

from jln._explain import Route, into, listening, note
from jln._modules.arguments import AS_GIVEN, Inputs, OfLayerNorm, OfRMSNorm, OfSum, promoted_sum, refuse_others, taken
from jln._modules.norms import Linear, Prepared
from jln._operators.eight_bits import Scaled


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
    def axes(self, layer: Any, x: Any) -> int | Iterable[int]:
        """The axes of x over which a norm is."""

    @abc.abstractmethod
    def prepared(self, layer: Any, x: Any, own: Mapping[str, Any]) -> Prepared | str:
        """A norm of x in the operators' terms, or the reason why they cannot compute it.

        It is the norm that is called, so that it may make its parameters here. Where a reason is returned it has not
        made them: that is for the framework's own code.
        """

    def existing(self, layer: Any, x: Any, own: Mapping[str, Any], caller: Any) -> Prepared | str:
        """A norm as of `prepared`, whose parameters exist and are read without a call of it.

        caller: the layer that is called, which may be the norm itself.
        """
        return self.prepared(layer, x, own)

    @abc.abstractmethod
    def linear(self, layer: Any, norm: Prepared, own: Mapping[str, Any]) -> Linear | str:
        """A Linear behind the norm in the operators' terms, or the reason why it cannot be."""

    def obstacle(self, layer: Any, role: str) -> str | None:
        """The reason why a norm must be called; None where its parameters may be read without. role: its name."""
        return None

    def reads_as_given(self, layer: Any) -> bool:
        """Tell whether a norm reads x as it is, but for a cast."""
        return True

    def is_layer_norm(self, layer: Any) -> bool:
        return isinstance(layer, self.theirs[0])

    def norm(self, layer: Any, x: Any, beside: Mapping[str, Any], **own: Any) -> Any:
        """Compute the call of a norm, from within it. beside: the arguments of `OfRMSNorm`."""
        refuse_others(beside, OfLayerNorm if self.is_layer_norm(layer) else OfRMSNorm, layer)
        over = () if beside.get("residual") is None else self.axes(layer, x)
        inputs = taken(x, over, **beside)
        if inputs.x_norm is not None:
            return self._both_sides(layer, inputs, own)
        name, norm = self._name(layer), self.prepared(layer, inputs.total, own)
        gated = inputs.arrays.z is not None or inputs.arrays.x_z is not None
        if gated and isinstance(norm, Prepared) and norm.offset is not None:
            norm = "the norm has an offset, and the gated operator has none"
        if isinstance(norm, str):
            inputs.refuse_own_code(norm)
            note(name, "plain", norm, inputs.total)
            cls = self.theirs[0 if self.is_layer_norm(layer) else 1]
            return inputs.result(inputs.computed_by(lambda a: cls.__call__(layer, a, **own)))
        operands, why = inputs.read_by(norm, self.reads_as_given(layer))
        note(name, "norm", why, norm.x)
        results = norm.value(operands, inputs.quantize)
        return inputs.result(results.y, results.total)

    def linears(
        self,
        layer: Any,
        norm: Any,
        linears: Mapping[str, Any],
        x: Any,
        beside: Mapping[str, Any],
        *,
        several: bool,
        of_linears: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Any:
        """Compute the call of a norm with Linears, from within it: as one operator, or each called by itself.

        beside: the arguments of `OfSum`. several: whether the result is a tuple. of_linears: arguments of the Linears.
        """
        refuse_others(beside, OfSum, layer)
        inputs, of_linears = taken(x, **beside), of_linears or {}
        name = self._name(layer, f"{self._kind(norm)}{self.linear_name}")
        operator = self._fused(norm, linears, inputs, layer, of_linears, own)
        if isinstance(operator, str) and inputs.quantize is not None:
            self._call_each(norm, linears, inputs, of_linears, own)
            operator = self._fused(norm, linears, inputs, layer, of_linears, own, called=True)
        if not isinstance(operator, str):
            prepared, kernels = operator
            operands, why = inputs.read_by(prepared, self.reads_as_given(norm))
            note(name, "fused", why, prepared.x)
            results = prepared.linears(kernels, operands, inputs.quantize)
            y = results.y if several else results.y[0]
            return inputs.result(y if results.y_max is None else Scaled(y, results.y_max), results.total)
        inputs.refuse_own_code(operator)
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
        caller: Any,
        of_linears: Mapping,
        own: Mapping,
        called: bool = False,
    ) -> tuple[Prepared, list[Linear]] | str:
        """A norm and Linears in the operators' terms, or the reason why they cannot be one operator.

        No layer is called here: nobody sees half a result. called: whether all have been.
        """
        if not called and (obstacle := self.obstacle(norm, "the norm")) is not None:
            return obstacle
        if type(norm).__call__ not in [cls.__call__ for cls in (*self.ours, *self.theirs)]:
            return "the norm has a call of its own"
        prepared = self.existing(norm, inputs.total, own, caller)
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

    def _both_sides(self, layer: Any, inputs: Inputs, own: Mapping[str, Any]) -> tuple[Any, jax.Array]:
        """Compute `(norm(total), total)` with `total = residual + x_norm(x)`: as one operator, or one by one."""
        x, residual, x_norm, cls = inputs.arrays.x, inputs.arrays.residual, inputs.x_norm, self.ours[1]
        if not isinstance(x_norm, cls):
            got = type(x_norm)
            asked = f"{cls.__module__}.{cls.__name__}"
            raise TypeError(f"x_norm must be a {asked}; got a {got.__name__} of {got.__module__}")
        is_ours, name = type(x_norm).__call__ is cls.__call__, self._name(layer)

        def read(norm: Any, role: str, a: jax.Array) -> Prepared | str:
            return self.obstacle(norm, role) or self.existing(norm, a, own if norm is layer else {}, layer)

        why = in_front = read(x_norm, "x_norm", x) if is_ours else "x_norm has a call of its own"
        if isinstance(in_front, Prepared):  # the residual has the total's shape, and that is all that is asked
            behind = read(layer, "the norm", residual.astype(in_front.dtype_added_to(residual)))
            why = in_front.obstacle_of_both(behind, residual, self.reads_as_given(layer))
            if isinstance(behind, Prepared) and why is None:
                note(name, "norm", f"{AS_GIVEN}, those of x_norm too", x)
                return in_front.followed_by(behind, residual, inputs.quantize)
        total = x_norm(x, added_to=residual) if is_ours else promoted_sum(residual, x_norm(x))
        routes: list[Route] = []
        with listening(into(routes)):
            y = self.norm(layer, total, {"quantize": inputs.quantize}, **own)
        for route in routes:
            note(*route[:2], f"not one operator with x_norm: {why}" if route.path == "norm" else route.why, x)
        return y, total

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
