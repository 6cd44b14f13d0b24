"""Models that were written for a framework's own layers, on jln's.

    conversion = jln.convert.nnx(model)         # Flax NNX: in place, or copy=True
    conversion = jln.convert.equinox(model)     # Equinox: conversion.model is the new tree
    with jln.convert.linen() as routes: ...     # Flax Linen: every call in the context, the model's code untouched
    with jln.convert.haiku() as routes: ...     # Haiku: likewise

Only `LayerNorm` and `RMSNorm` themselves are swapped, for classes that are theirs but for the call: parameters,
metadata and checkpoints stay what they are. A subclass may compute something else; it is left alone, and named.

A norm that feeds exactly one Linear can be fused with it (Flax NNX and Equinox). Which one that is only the model
knows, so it must be declared: by an attribute of its class, `norm_linear_pairs = [("norm", "qkv"), ("ln", "mlp.up")]`,
and `fuse=True`, or for a class that was not written for jln by `fuse={Block: [("norm", "qkv")]}`, which holds for its
subclasses too. If anything else reads the norm's result, it raises TypeError: what it gets is no array. It has an
array's `shape`, `ndim` and `dtype`, and every other attribute raises an error that is an AttributeError, too: `hasattr`
and `getattr` with a default answer for it. It is a pytree that holds
the norm's input and, in Flax NNX, its parameters, so what maps over a pytree (`jax.lax.psum`, `jax.tree.map`, ...) must
not stand between the two, nor may the norm alone be differentiated (`jax.jvp`, `jax.vjp`): that would be of those
instead of the result. A transformation around the norm alone that gives them another shape (`jax.vmap`,
`jax.lax.scan`) raises TypeError. While `nnx.capture` watches, the norm's result is an array, and nothing is fused;
`sow` without it stores that pytree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jln.convert import _interceptors
from jln.convert._common import Change, Conversion, Pairs
from jln.convert._interceptors import Routes

__all__ = ["Change", "Conversion", "Routes", "equinox", "haiku", "linen", "nnx"]


def nnx(model: Any, *, copy: bool = False, fuse: bool | Mapping[type, Pairs] = False) -> Conversion:
    """Every `flax.nnx.LayerNorm` and `RMSNorm` of a model as jln's.

    The layer objects stay the same and change their class, so all that refers to them or to their parameters (an
    optimizer, a layer used twice, sharding metadata, a checkpoint) goes on as before, also where norms are fused.

    Args:
      model: a `flax.nnx.Module`.
      copy: leave `model` as it is and convert a clone, `conversion.model`.
      fuse: see `jln.convert`.

    Returns:
      The `Conversion`; its `undo()` gives the layers their classes back, with the parameters as they are then.

    Raises:
      TypeError: `model` is not a `flax.nnx.Module`, or `fuse` is malformed.
      ValueError: a pair to be fused is not a LayerNorm or RMSNorm and a Linear or LinearGeneral of Flax, or a norm is
        in two pairs, or the model has nothing of a class that `fuse` names. Nothing has been changed then.
    """
    from jln.convert import _nnx

    return _nnx.convert(model, copy, fuse)


def equinox(model: Any, *, fuse: bool | Mapping[type, Pairs] = False) -> Conversion:
    """Every `equinox.nn.LayerNorm` and `RMSNorm` of a tree as jln's, in a new tree with the same leaves.

    A norm that is fused moves into the layer that takes the Linear's place, which holds both, `norm` and `linear`, and
    remains the Linear for every other array that the model gives it. So the leaves of a tree with fused norms may have
    another order, in which `eqx.tree_deserialise_leaves` would read a file of the unfused tree without an error into
    the wrong layers: read the file before the conversion, or into the unfused tree, and write `conversion.undo(tree)`.

    Args:
      model: any pytree of Equinox modules.
      fuse: see `jln.convert`.

    Returns:
      The `Conversion`: `conversion.model` is the new tree; `conversion.undo(tree)` gives `tree`, the converted one with
      whatever leaves it has by then, its former classes back.

    Raises:
      TypeError: `fuse` is malformed.
      ValueError: a pair to be fused is not a LayerNorm or RMSNorm and a Linear of Equinox, or a norm is in two pairs,
        or the tree has nothing of a class that `fuse` names.
    """
    from jln.convert import _equinox

    return _equinox.convert(model, fuse)


@contextlib.contextmanager
def linen() -> Iterator[Routes]:
    """A context in which every `flax.linen.LayerNorm` and `RMSNorm` that is called computes as jln's.

    A function under `jax.jit` is traced again inside, and runs as before outside. Yields a list that grows with every
    layer that is called or traced in the context (of nested ones, the outermost): its name, path and why, as in
    `jln.explain`. What an earlier context traced JAX does not trace again; such layers are in the list's `earlier`, and
    `jln.explain(function, *args)` in the context tells which of them are a function's.
    """
    from jln import linen as ours

    norms = (ours.FlaxLayerNorm, ours.FlaxRMSNorm)
    with _interceptors.swapping("linen", norms, ours, ours.nn.intercept_methods) as routes:
        yield routes


@contextlib.contextmanager
def haiku() -> Iterator[Routes]:
    """A context in which every `haiku.LayerNorm` and `RMSNorm` that is called computes as jln's; see `linen`."""
    from jln import haiku as ours

    norms = (ours.HaikuLayerNorm, ours.HaikuRMSNorm)
    with _interceptors.swapping("haiku", norms, ours, ours.hk.intercept_methods) as routes:
        yield routes
