"""Conversion of models that were written for a framework's own layers to jln's.

    conversion = jln.convert.nnx(model)         # Flax NNX: in place, or copy=True
    conversion = jln.convert.equinox(model)     # Equinox: conversion.model is the new tree
    with jln.convert.linen() as routes: ...     # Flax Linen: every call in the context, the model's code untouched
    with jln.convert.haiku() as routes: ...     # Haiku: every call in the context, the model's code untouched

A framework's `LayerNorm` and `RMSNorm` are swapped for classes that are theirs but for the call: parameters, metadata
and checkpoints stay what they are. A subclass that ends in the framework's own call, by `super().__call__`, ends in
jln's. A model's own norm is left alone, and named, until a recipe tells what it computes:

    norms={RMSNorm: lambda m: dict(kind="rms_norm", scale=m.scale, epsilon=m.eps, zero_centered_scale=True)}

A recipe is a function of the module that returns a mapping. `kind` ("layer_norm" or "rms_norm") and `epsilon` must be
in it; `scale`, `offset`, `zero_centered_scale`, `axis` (an int or a tuple) and `dtype` are where they apply. `dtype` is
that of the result, by default the result's own. A recipe is called after the module's own call, so it finds parameters
that only the call makes; a compiled program has no trace of that call. A recipe goes before all that jln knows of a
class, so a subclass of a framework's norm with a call of its own may have one.

With `fuse` a Linear that reads a norm's result keeps the norm's input for the backward pass in place of that result,
and makes the result again: one kernel a norm, for all Linears that read it. Few features (up to 256 in 16 bits, 128 in
float32) are multiplied by the norm's own kernels. Anything else may read the norm's result as well. Nothing has to be
declared: a Linear knows the result by its identity, also in another module. It does not know it behind a cast, a
dropout, or the border of a `jax.jit`, a `jax.checkpoint` or a scan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jln._modules import Recipe
from jln.convert import _interceptors
from jln.convert._common import Change, Conversion, Fuse
from jln.convert._interceptors import Routes

__all__ = ["Change", "Conversion", "Routes", "equinox", "haiku", "linen", "nnx"]


Norms = Mapping[type, Recipe]


def nnx(model: Any, *, copy: bool = False, fuse: Fuse = False, norms: Norms | None = None) -> Conversion:
    """Convert every `flax.nnx.LayerNorm` and `RMSNorm` of a model to jln's.

    The layer objects stay the same and change their class, so all that refers to them or to their parameters (an
    optimizer, a layer used twice, sharding metadata, a checkpoint) goes on as before, also where norms are fused.

    Args:
      model: a `flax.nnx.Module`.
      copy: leave `model` as it is and convert a clone, `conversion.model`.
      fuse: True: every `Linear`, `LinearGeneral` and `Einsum`. Or those that a mapping names, `{Block: [("norm", ("q",
        "k", "v")), ("norm2", "mlp.layers[0]")]}`, which holds for subclasses too.
      norms: recipes of the model's own norms; see `jln.convert`.

    Returns:
      The `Conversion`; its `undo()` gives the layers their classes back, with the parameters as they are then.

    Raises:
      TypeError: `model` is not a `flax.nnx.Module`, or `fuse`, `norms` or a recipe is malformed.
      ValueError: what `fuse` names is not a norm and Linears, or the model has nothing of a class that it names; or a
        recipe's kind is unknown. Nothing has been changed then.
    """
    from jln.convert import _nnx

    return _nnx.convert(model, copy, fuse, norms)


def equinox(model: Any, *, fuse: Fuse = False, norms: Norms | None = None) -> Conversion:
    """Convert every `equinox.nn.LayerNorm` and `RMSNorm` of a tree to jln's, in a new tree with the same leaves.

    Args:
      model: any pytree of Equinox modules.
      fuse: True: every `Linear`. Or those that a mapping names, as of `nnx`.
      norms: recipes of the model's own norms; see `jln.convert`.

    Returns:
      The `Conversion`: `conversion.model` is the new tree; `conversion.undo(tree)` gives `tree`, the converted one with
        whatever leaves it has by then, its former classes back.

    Raises:
      TypeError: `fuse`, `norms` or a recipe is malformed.
      ValueError: what `fuse` names is not a norm and Linears, or the tree has nothing of a class that it names; or a
        recipe's kind is unknown.
    """
    from jln.convert import _equinox

    return _equinox.convert(model, fuse, norms)


@contextlib.contextmanager
def linen(*, fuse: bool = False, norms: Norms | None = None) -> Iterator[Routes]:
    """Open a context in which every `flax.linen.LayerNorm` and `RMSNorm` that is called computes as jln's.

    A function under `jax.jit` is traced again inside, and runs as before outside. JAX does not trace again what an
    earlier context traced.

    Args:
      fuse: True: also every `Dense`, `DenseGeneral` and `Einsum`, as `jln.convert` says.
      norms: recipes of the model's own norms; see `jln.convert`. What a module makes in its call a recipe finds as
        `m.get_variable("params", "scale")`. In a loop give the same functions each time: for others JAX traces again.

    Returns:
      A context that yields a list of `jln.Route`. It grows with every layer that is called or traced in the context (of
        nested ones, the outermost). Layers traced in an earlier context are in the list's `earlier`, and
        `jln.explain(function, *args)` in the context tells which of them are a function's.

    Raises:
      TypeError: `fuse`, `norms` or, in a call, a recipe is malformed.
      ValueError: `norms` names a class of Flax's; or, in a call, a recipe's kind is unknown.
    """
    from jln.convert._linen import LINEN

    with _interceptors.swapping(LINEN, fuse, norms) as routes:
        yield routes


@contextlib.contextmanager
def haiku(*, fuse: bool = False, norms: Norms | None = None) -> Iterator[Routes]:
    """Open a context in which every `haiku.LayerNorm` and `RMSNorm` that is called computes as jln's.

    Args:
      fuse: True: also every `Linear`, as `jln.convert` says.
      norms: recipes of the model's own norms; see `jln.convert`. What a module makes in its call a recipe finds as
        `m.params_dict()[f"{m.module_name}/scale"]`. In a loop give the same functions each time: for others JAX traces
        again.

    Returns:
      A context that yields a list of `jln.Route`, as `linen` does.

    Raises:
      TypeError: `fuse`, `norms` or, in a call, a recipe is malformed.
      ValueError: `norms` names a class of Haiku's; or, in a call, a recipe's kind is unknown.
    """
    from jln.convert._haiku import HAIKU

    with _interceptors.swapping(HAIKU, fuse, norms) as routes:
        yield routes
