"""Recipes: functions that tell of a model's own norm what it computes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln._explain import unasked
from jln._modules.arguments import Summed, axes
from jln._modules.calls import computed, noted, prepared

# A function from a module to what its norm is: `kind` and `epsilon`, and where they apply `scale`, `offset`,
# `zero_centered_scale`, `axis` and `dtype`.
Recipe = Callable[[Any], Mapping[str, Any]]

KINDS = {"layer_norm": True, "rms_norm": False}  # whether they subtract the mean
_KNOWN = ("kind", "epsilon", "scale", "offset", "zero_centered_scale", "axis", "dtype")


def computed_by_recipe(
    layer: str, recipe: Recipe, module: Any, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The result of `module`, a model's own norm, by the operators.

    plain, args, kwargs: the module's own call, which is made first: parameters may be there only after it, and it tells
      the dtype of the result. A compiled program has no trace of it.

    Raises:
      TypeError, ValueError: what the recipe returns is not as it must be.
    """
    with unasked():
        result = plain(*args, **kwargs)
    described = described_by(recipe, module)
    read = [*args, *(a for a in kwargs.values() if a is not None)]
    if len(read) != 1:
        return noted(layer, "it is called with more than an array", result, lambda: result)
    (x,) = read
    if not isinstance(result, jax.Array) or result.shape != np.shape(x):
        return noted(layer, "its result does not have the shape of what it reads", result, lambda: result)
    over = axes(described.get("axis", -1))
    found = prepared(
        x,
        described.get("scale"),
        described.get("offset"),
        axes=over,
        parameter_axes=sorted(a % result.ndim for a in over) if result.ndim else (),
        epsilon=described["epsilon"],
        subtract_mean=KINDS[described["kind"]],
        zero_centered_scale=bool(described.get("zero_centered_scale", False)),
        y_dtype=described.get("dtype") or result.dtype,
    )
    return computed(layer, found, Summed(x), lambda _: result)


def described_by(recipe: Recipe, module: Any) -> Mapping[str, Any]:
    """The mapping that the recipe returns for the module, checked. Raises TypeError or ValueError where it is wrong."""
    name = f"norms[{type(module).__name__}]"
    try:
        described = recipe(module)
    except Exception as error:
        error.add_note(f"raised by {name}, a recipe")
        raise
    if not isinstance(described, Mapping) or not {"kind", "epsilon"} <= {*described}:
        raise TypeError(f"{name} must return a mapping with kind and epsilon; got {described!r}")
    if unknown := [key for key in described if key not in _KNOWN]:
        raise TypeError(
            f"{name} returns {', '.join(map(repr, unknown))}, of which jln knows nothing; it knows {_KNOWN}"
        )
    if described["kind"] not in KINDS:
        raise ValueError(f"{name} must return a kind of {tuple(KINDS)}; got {described['kind']!r}")
    if described.get("zero_centered_scale") and described.get("scale") is None:
        raise ValueError(f"{name} returns zero_centered_scale=True, which needs a scale")
    for key in ("scale", "offset"):
        if not (described.get(key) is None or hasattr(described[key], "shape")):
            raise TypeError(f"{name} must return an array or None as {key}; got {described[key]!r}")
    axis = described.get("axis", -1)
    if not all(isinstance(a, int) for a in axes(axis)):
        raise TypeError(f"{name} must return an int or a tuple of them as axis; got {axis!r}")
    try:
        jnp.dtype(described.get("dtype"))
    except TypeError as error:
        raise TypeError(f"{name} must return a dtype or None as dtype; got {described['dtype']!r}") from error
    return described


def checked_recipes(norms: Any, base: type, theirs: tuple[type, ...]) -> dict[type, Recipe]:
    """The user's recipes as a dictionary by class.

    norms: as the user gives them.
    base: the class of all of the framework's modules.
    theirs: the framework's own norms, which jln knows without a recipe.

    Raises:
      TypeError: `norms` is not a mapping from classes of modules to functions.
      ValueError: a class is the framework's.
    """
    norms = {} if norms is None else norms
    if not isinstance(norms, Mapping) or not all(callable(recipe) for recipe in norms.values()):
        raise TypeError(f"norms must be a mapping from classes to functions of a module; got {norms!r}")
    for cls in norms:
        if not isinstance(cls, type) or not issubclass(cls, base):
            raise TypeError(f"norms must name classes of {base.__module__}.{base.__name__}; got {cls!r}")
        if not isinstance(norms[cls], Hashable):  # JAX keeps a program for each recipe
            raise TypeError(f"norms must name functions that can be hashed; got {norms[cls]!r}")
        if cls in theirs:
            raise ValueError(f"norms names {cls.__module__}.{cls.__name__}, which jln knows without a recipe")
    return dict(norms)
