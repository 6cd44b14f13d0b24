"""The devices for which a program is lowered, and whether kernels can run on them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import mlir


@functools.cache
def needs_devices() -> ClosedJaxpr:
    """A jaxpr that, as a parameter of a primitive, has JAX tell the primitive's lowering which devices there are.

    Before a program is lowered JAX looks for `custom_partitioning` in it, and in every jaxpr that it contains. This one
    contains it.
    """
    function = custom_partitioning(lambda a: a)
    function.def_partition(lambda *_: None, sharding_rule="i -> i")
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((1,), jnp.float32))


@dataclasses.dataclass(frozen=True)
class Context:
    """The devices for which a program is lowered.

    mesh: all of them. One axis has them all where JAX knows no mesh, as under `jax.set_mesh` with nothing sharded.
    manual: the mesh axes over which a `jax.shard_map` has spread the program already.
    """

    mesh: Any
    manual: frozenset[str] = frozenset()


def find_context(context: mlir.ModuleContext, platform: str | None) -> tuple[Context | None, str | None]:
    """Return the devices over which JAX's partitioner will spread the program, and why a kernel cannot run.

    The first is None where the partitioner spreads nothing, the second where a kernel can run.
    """
    if platform == "rocm" and context.lowering_parameters.for_export:
        return None, "in an export for ROCm, whose plugin reads kernels from files that this process has"
    axis_context: Any = context.axis_context
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:  # inside shard_map
        spread = Context(axis_context.mesh, frozenset(manual))
        if all(size == 1 for name, size in spread.mesh.shape.items() if name not in manual):
            return None, None
    elif getattr(axis_context, "num_devices", 1) == 1:
        return None, None
    else:
        spread = Context(jax.sharding.Mesh(np.array(list(axis_context.device_assignment or ())), ("all",)))
    if context.lowering_parameters.for_export:
        return None, "in an export for several devices, except in a jax.shard_map over all of them"
    return spread, None


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `function` of one device's arrays to be traced as if nobody had set a mesh.

    On a mesh with explicit axes every value would be taken for an array that is spread over it.
    """

    def call(*operands: jax.Array) -> Any:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            jaxpr = jax.make_jaxpr(jax.jit(function))(*shapes)
        return tuple(jaxpr_as_fun(jaxpr)(*operands))

    return call
