"""What dimensions the arrays of an operation share, and over which its results are sums."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


class Kind(enum.IntEnum):
    """What a dimension counts. Mesh axes are given out in this order: where one splits the rows and a parameter, it is
    the parameter that is gathered.
    """

    BATCH = 0  # vmap's axes
    ROW = 1
    FEATURE = 2
    HIDDEN = 3  # the normalised axis
    SHARE = 4  # those of a sum


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension that operands and results share. One of size 1 where others have more has no part in it.

    stored_as: the array whose dimension this is alone: it is computed as any other, but shardings do not propagate from
    it. So parameters that are only stored in parts (FSDP) are gathered, instead of splitting the rows.
    of: which of several products' features.
    """

    kind: Kind
    index: int = 0
    stored_as: str = ""
    of: int = 0

    @property
    def computed(self) -> Dim:
        return Dim(self.kind, self.index, of=self.of)

    def factor(self) -> str:
        """Its name in a Shardy rule."""
        return f"{self.kind.name.lower()}{self.index}of{self.of}{self.stored_as}"


Dims = tuple[Dim, ...]


def leaves_or_none(tree: Any) -> list[Any]:
    """The leaves of a tree, those that are None among them."""
    return jax.tree.leaves(tree, is_leaf=lambda a: a is None)


def _present(arrays: Any, described: Any) -> list[Any]:
    """Of what is described for each of the arrays, what describes one that is there."""
    given, tree = jax.tree.flatten(arrays, is_leaf=lambda a: a is None)
    return [d for a, d in zip(given, tree.flatten_up_to(described), strict=True) if a is not None]


@dataclasses.dataclass(frozen=True)
class Result:
    """summed: the kinds of dimension over which every device has only its share of a sum, in the order in which they
    are to be added up: by results that are to travel together. wide: added up in float32 at least.
    """

    dims: Dims
    summed: tuple[Kind, ...] = ()
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Term:
    """An operand that is added to a sum over features: where every device has a share of that, by one of them only."""

    dims: Dims


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of an operation's operands, and of its results, those that are there, in order. terms: which are `Term`s."""

    given: list[Dims]
    terms: list[bool]
    written: list[Result]

    @classmethod
    def of(cls, operands: Any, dims: Any, dtypes: Any, results: Any) -> Layout:
        """`dims` and `results` describe everything: what `operands` and `dtypes`, beside them, say is absent goes."""
        given = _present(operands, dims)
        terms = [isinstance(d, Term) for d in given]
        return cls([d.dims if isinstance(d, Term) else d for d in given], terms, _present(dtypes, results))

    def widened(self, dtypes: Any) -> Any:
        """The results' dtypes with those that are added up wide made wide."""
        names, tree = jax.tree.flatten(dtypes)
        wide = [
            jnp.promote_types(d, jnp.float32).name if r.wide else d for d, r in zip(names, self.written, strict=True)
        ]
        return tree.unflatten(wide)

    def rule(self, operands: Sequence[Any], results: Sequence[Any]) -> str:
        """In Shardy's notation, for arrays of these shapes."""
        alone = iter(range(sum(a.ndim for a in (*operands, *results))))

        def factors(dims: Dims, shape: tuple[int, ...]) -> str:
            return " ".join(f"u{next(alone)}" if n == 1 else d.factor() for d, n in zip(dims, shape, strict=True))

        def side(dims: Sequence[Dims], arrays: Sequence[Any]) -> str:
            return ", ".join(factors(d, a.shape) for d, a in zip(dims, arrays, strict=True))

        return f"{side(self.given, operands)} -> {side([r.dims for r in self.written], results)}"
