"""Names that tell JAX's compilation cache what a call computes on devices that JAX spreads a program over.

There a program has a call of `custom_partitioning`, whose only mark is the address of a Python object: another one in
each process, and perhaps another call's after a restart. Here it has a name instead, made of all that the call computes
by: what `identity` is told, this package's code and the versions of what compiles it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import pathlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import custom_partitioning as jax_partitioning
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

# The parameters and results of JAX's primitive, and the name: `_lower` writes it where JAX has written an address.
_named = Primitive("jln_partitioned")
_named.multiple_results = True
_named.def_abstract_eval(lambda *_, call, **__: call.out_avals)


def identity(*facts: Any) -> str:
    """Return a hash of the facts, the same in every process.

    A fact is None, a number, a string, a dtype, a tree's structure, a class, a mesh; a tuple, set or dataclass of them.
    Anything else may have changed where it looks the same: then the name is one that nothing else ever has.
    """
    config: Any = jax.config
    modes = config.jax_enable_x64, config.jax_default_matmul_precision
    try:
        return hashlib.sha256(_text((facts, modes, _code())).encode()).hexdigest()[:32]
    except TypeError:
        return secrets.token_hex(16)


def call_by_name(
    name: str,
    function: Callable[..., Sequence[jax.Array]],
    plan: Callable[..., tuple[Any, ...]],
    sharding_rule: str | Any,
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    """Call a function in a program that JAX spreads over devices, under a name for what it computes.

    plan: from the mesh, the operands and the results, each with its sharding, to the mesh, the function of one device's
      parts, the results' shardings and the operands'.
    """
    spread = custom_partitioning(lambda *operands: tuple(function(*operands)))
    spread.def_partition(
        partition=plan,
        infer_sharding_from_operands=lambda *arguments: plan(*arguments)[2],
        decode_shardings=False,  # JAX knows no parts of mesh axes
        sharding_rule=sharding_rule,
    )
    (eqn,) = jax.make_jaxpr(spread)(*operands).eqns
    return _named.bind(*operands, name=name, **eqn.params)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, name: str, **params: Any) -> Any:
    results = jax_partitioning._custom_partitioning_lowering_rule(ctx, *operands, **params)
    attributes: Any = results[0].owner.attributes
    asked = jax_partitioning._sharding_callbacks  # what XLA asks, by name, as long as a program keeps it alive
    asked_here = asked[attributes["backend_config"].value.encode()]
    name = identity(name, asked_here.mesh)
    attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({"jln": ir.StringAttr.get(name)})
    answer = asked.setdefault(name.encode(), asked_here)
    if _place(answer) == _place(asked_here):  # not one of a backend that JAX has cleared
        attributes["backend_config"] = ir.StringAttr.get(name)
        ctx.module_context.add_keepalive(answer)
    return results


mlir.register_lowering(_named, _lower)


def _place(answer: Any) -> tuple[Any, ...]:
    context = answer.module_context
    return answer.mesh, context.platforms, context.backend


def _text(fact: Any) -> str:
    """The fact in words. Raises TypeError where it is none that can be told in full."""
    kind = type(fact)
    if fact is None or isinstance(fact, bool | int | float | str | bytes | np.dtype | jax.tree_util.PyTreeDef):
        inner = repr(fact)
    elif isinstance(fact, type | enum.Enum):
        inner = f"{fact.__module__}.{getattr(fact, '__qualname__', fact)}"
    elif isinstance(fact, tuple | list):
        inner = ",".join(map(_text, fact))
    elif isinstance(fact, frozenset):
        inner = ",".join(sorted(map(_text, fact)))
    elif isinstance(fact, jax.sharding.Mesh):
        inner = _text((fact.axis_names, fact.devices.shape, [getattr(d, "id", None) for d in fact.devices.flat]))
    elif dataclasses.is_dataclass(fact):
        inner = ",".join(_text(getattr(fact, field.name)) for field in dataclasses.fields(fact))
    else:
        raise TypeError(f"{kind.__qualname__} is not known")
    return f"{kind.__qualname__}({inner})"


@functools.cache
def _code() -> list[str]:
    """A hash of the package's sources, and the versions of what compiles them."""
    root = pathlib.Path(__file__).parent.parent
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))).hexdigest()
    return [sources, *(_version(package) for package in ("jln", "jax", "jaxlib", "triton", "jax-triton"))]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
