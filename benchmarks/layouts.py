"""The layout of a stack's parameters, stream and features on a mesh, as trainers shard them.

Only stacks whose Linears are `apart` have a layout: to split the features of a joint Linear into queries, keys and
values would move them between devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stacks import Loss, Stack

STAGES, TENSOR = "pipeline", "tensor"
ROWS = ("data", "fsdp")  # what splits the batch; the second splits what is stored of each kernel, too
AXES = (STAGES, *ROWS, TENSOR)  # from the outside of a cluster inwards
NO_MESH = Mesh(np.empty((), object), ())
SPLIT_BY_ROWS = ("out", "down")  # the Linears that lead back to the stream: tensor parallelism splits their products


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of a stack's arrays on a mesh.

    mesh: its axes are some of `AXES`; a mesh without axes is one device.
    sequence: between the blocks the stream is split by tokens over the axis "tensor", whose devices split the Linears'
      features (Megatron's sequence parallelism). Otherwise each of these devices has the whole stream.
    """

    mesh: Mesh = NO_MESH
    sequence: bool = False

    def size(self, *axes: str) -> int:
        return math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    stages = property(lambda self: self.size(STAGES))

    sizes = property(lambda self: " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items()))

    def fitted(self, stack: Stack) -> Stack:
        """The stack with as many sequences as the batch's axes need.

        Raises ValueError for sizes that the mesh cannot split.
        """
        rows = self.size(*ROWS)
        batch, tokens, width = stack.shape
        split = [
            (STAGES, stack.layers, "layers"),
            ("fsdp", width, "features"),
            (TENSOR, width, "features"),
            (TENSOR, stack.hidden, "hidden features"),
            (TENSOR, stack.heads, "heads"),
            (TENSOR, stack.key_heads or stack.heads, "heads of keys"),
            (TENSOR, tokens if self.sequence else 0, "tokens"),
        ]
        for axis, count, what in split:
            if count % self.size(axis):
                raise ValueError(f"{stack.name} has {count} {what}, which {axis}={self.size(axis)} does not divide")
        return dataclasses.replace(stack, shape=(math.ceil(batch / rows) * rows, tokens, width))

    def stream(self, x: jax.Array) -> jax.Array:
        """Shard `x [..., batch, tokens, width]` as the stream is between blocks."""
        return self._constrained(x, self._of_stream())

    def features(self, y: jax.Array) -> jax.Array:
        """Shard `y [..., batch, tokens, features]` as the features behind a norm's Linears are."""
        return self._constrained(y, self._spec(ROWS, None, TENSOR))

    def attend(self, stack: Stack, projected: Sequence[jax.Array]) -> jax.Array:
        """The stack's attention, sharded.

        In a pipeline's stage, where some mesh axes are manual, JAX cannot partition cuDNN's attention: there it is in a
        `shard_map` of its own. JAX would give what it keeps for the backward pass a wrong sharding, so it is made
        again.
        """
        projected = [self.features(y) for y in projected]
        attend = stack.attend
        if self.stages > 1 and stack.attention == "cudnn":
            spec, inner = self._spec(ROWS, None, TENSOR), {*self.mesh.axis_names} - {STAGES}
            attend = jax.shard_map(jax.checkpoint(attend), in_specs=spec, out_specs=spec, axis_names=inner)
        return self.features(attend(projected))

    def arguments(self, stack: Stack) -> tuple[Any, jax.ShapeDtypeStruct]:
        """A step's (parameters, x) as shapes with their shardings.

        In a pipeline the parameters of blocks have an axis of stages in front, and x has one of microbatches, as many
        as there are stages.
        """
        parameters = dataclasses.replace(stack, layers=stack.layers // self.stages).parameters()

        def placed(path: Any, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            names = [key.key for key in path]
            shape, spec = a.shape, self._of_parameter(*names[-2:])
            if self.stages > 1 and names[0] != "norm":
                shape, spec = (self.stages, *shape), P(STAGES, *spec)
            return jax.ShapeDtypeStruct(shape, a.dtype, sharding=NamedSharding(self.mesh, spec))

        x, of_x = stack.x(), self._of_stream()
        if self.stages > 1:
            x, of_x = x.update(shape=(self.stages, *x.shape)), P(None, *of_x)
        return jax.tree_util.tree_map_with_path(placed, parameters), x.update(sharding=NamedSharding(self.mesh, of_x))

    def step(self, stack: Stack, loss: Loss) -> Callable[..., Any]:
        """Return a function (parameters, x) -> (loss, gradients of both), each gradient sharded like its argument."""
        places = jax.tree.map(lambda a: a.sharding, self.arguments(stack))

        def step(*arguments: Any) -> Any:
            value, gradients = stack.step(loss)(*arguments)
            return value, jax.lax.with_sharding_constraint(gradients, places)

        return step

    def pipelined(self, blocks: Callable[[Any, jax.Array], jax.Array], end: Callable[[Any, jax.Array], Any]) -> Loss:
        """The loss of a pipeline, in which each stage passes a microbatch on to the next.

        blocks: a stage's (parameters, x) -> x.
        end: what follows the last stage, (the final norm's parameters, x) -> loss.
        The mesh axis of stages is manual; all others are left to the compiler.
        """
        last = self.stages - 1

        def stage(parameters: Any, x: jax.Array) -> jax.Array:
            index = jax.lax.axis_index(STAGES)
            own = {name: jax.tree.map(lambda a: a[0], p) for name, p in parameters.items() if name != "norm"}

            def tick(received: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
                stage_input = jnp.where(index == 0, x[jnp.minimum(time, last)], received)
                result = blocks(own, stage_input)
                return jax.lax.ppermute(result, STAGES, [(i, i + 1) for i in range(last)]), result

            nothing = jax.lax.pcast(jnp.zeros_like(x[0]), STAGES, to="varying")
            results = jax.lax.scan(tick, nothing, jnp.arange(2 * self.stages - 1))[1][last:]
            return jax.lax.psum(jnp.where(index == last, end(parameters["norm"], results), 0), STAGES)

        def loss(parameters: Any, x: jax.Array) -> jax.Array:
            specs = {name: P() if name == "norm" else P(STAGES) for name in parameters}
            manual = {"mesh": self.mesh, "axis_names": {STAGES}}
            return jax.shard_map(stage, in_specs=(specs, P()), out_specs=P(), **manual)(parameters, x)

        return loss

    def among(self, group: Sequence[int] | None) -> tuple[str, ...]:
        """The mesh axes along which the devices of a collective's group differ."""
        sizes = tuple(self.mesh.shape.values())
        at = np.unravel_index(range(self.mesh.size) if group is None else group, sizes)
        return tuple(axis for axis, where in zip(self.mesh.axis_names, at, strict=True) if len({*where}) > 1)

    def _of_stream(self) -> P:
        return self._spec(ROWS, TENSOR if self.sequence else None, None)

    def _of_parameter(self, module: str, name: str) -> P:
        if name == "kernel":  # [features in, features out]
            if module in SPLIT_BY_ROWS:
                return self._spec(TENSOR, "fsdp")
            return self._spec("fsdp", TENSOR)
        split = name == "bias" and not module.startswith(("norm", "post")) and module not in SPLIT_BY_ROWS
        return self._spec(TENSOR) if split else P()

    def _spec(self, *axes: str | tuple[str, ...] | None) -> P:
        """A PartitionSpec of the given axes, without those that the mesh lacks."""

        def there(named: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
            names = (named,) if isinstance(named, str) else named or ()
            return tuple(name for name in names if self.size(name) > 1) or None

        return P(*map(there, axes))

    def _constrained(self, a: jax.Array, spec: P) -> jax.Array:
        if self.mesh.empty:
            return a
        within: Mesh | AbstractMesh = jax.sharding.get_abstract_mesh()  # in a stage, one whose axis of stages is manual
        spec = P(*(None,) * (a.ndim - len(spec)), *spec)
        return jax.lax.with_sharding_constraint(a, NamedSharding(self.mesh if within.empty else within, spec))
