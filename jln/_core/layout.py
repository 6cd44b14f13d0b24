"""Layouts: the dimensions that the arrays of an operation share, and those over which its results are sums."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


class Kind(enum.IntEnum):
    """The kinds of dimension, in the order in which they are given mesh axes.

    Where one mesh axis splits the rows and a parameter, rows come first, and the parameter is gathered.
    """

    BATCH = 0  # vmap's axes
    ROW = 1
    FEATURE = 2
    HIDDEN = 3  # the normalised axis
    SHARE = 4  # those of a sum


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension that operands and results share. An array that has 1 where others have more has no part in it.

    stored_as: the name of an array whose dimension this is alone, in which shardings do not propagate: parameters that
      are only stored in parts (FSDP) are gathered, instead of splitting the rows.
    """

    kind: Kind
    index: int = 0
    stored_as: str = ""

    @property
    def computed(self) -> Dim:
        return Dim(self.kind, self.index)

    def factor(self) -> str:
        """The dimension's name in a Shardy rule."""
        return f"{self.kind.name.lower()}{self.index}{self.stored_as}"


Dims = tuple[Dim, ...]


def leaves_or_none(tree: Any) -> list[Any]:
    """The leaves of a tree, with None counted as a leaf."""
    return jax.tree.leaves(tree, is_leaf=lambda a: a is None)


def _present(arrays: Any, described: Any) -> list[Any]:
    """The descriptions of those arrays that are not None.

    described: a tree like `arrays`, with a description in place of each array.
    """
    given, tree = jax.tree.flatten(arrays, is_leaf=lambda a: a is None)
    return [d for a, d in zip(given, tree.flatten_up_to(described), strict=True) if a is not None]


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of an operation.

    summed: the kinds of dimension over which every device has only its share of the sum. They are added up in this
      order, the same for results that are to travel together.
    wide: whether the shares are added up in float32 at least.
    """

    dims: Dims
    summed: tuple[Kind, ...] = ()
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Term:
    """An operand that is added to a sum over features: where every device has a share of the sum, only one adds it."""

    dims: Dims


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dimensions of the operands and results of an operation, without those that are absent, in order.

    terms: for each operand, whether it is a `Term`. whole: the kinds of dimension that no mesh axis may split.
    """

    given: list[Dims]
    terms: list[bool]
    written: list[Result]
    whole: tuple[Kind, ...] = ()

    @classmethod
    def of(cls, operands: Any, dims: Any, dtypes: Any, results: Any, whole: tuple[Kind, ...] = ()) -> Layout:
        """A layout from descriptions of all operands and results, less those that are absent.

        dims, results: a description in place of each operand and of each result.
        operands, dtypes: trees like these two, with None for what is absent.
        """
        given = _present(operands, dims)
        terms = [isinstance(d, Term) for d in given]
        return cls([d.dims if isinstance(d, Term) else d for d in given], terms, _present(dtypes, results), whole)

    def widen(self, dtypes: Any) -> Any:
        """The results' dtypes, at least float32 for results that are added up wide."""
        names, tree = jax.tree.flatten(dtypes)
        wide = [
            jnp.promote_types(d, jnp.float32).name if r.wide else d for d, r in zip(names, self.written, strict=True)
        ]
        return tree.unflatten(wide)

    def rule(self, operands: Sequence[Any], results: Sequence[Any]) -> str:
        """The layout as a Shardy rule, for arrays of these shapes."""
        alone = iter(range(sum(a.ndim for a in (*operands, *results))))

        def factors(dims: Dims, shape: tuple[int, ...]) -> str:
            return " ".join(f"u{next(alone)}" if n == 1 else d.factor() for d, n in zip(dims, shape, strict=True))

        def side(dims: Sequence[Dims], arrays: Sequence[Any]) -> str:
            return ", ".join(factors(d, a.shape) for d, a in zip(dims, arrays, strict=True))

        return f"{side(self.given, operands)} -> {side([r.dims for r in self.written], results)}"
