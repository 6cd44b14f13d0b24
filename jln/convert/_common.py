"""What a conversion is, whatever the framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Pairs = Sequence[tuple[str, str]]
DECLARATION = "norm_linear_pairs"


class Change(NamedTuple):
    """What happened to a layer. path: where it is in the model. before, after: its classes; `after` is empty for one
    that was left as it was. why: a few words.
    """

    path: str
    before: str
    after: str
    why: str

    def __str__(self) -> str:
        what = f"{self.before} -> {self.after}" if self.after else f"{self.before} left"
        return f"{self.path or 'model'}: {what} ({self.why})"


class Conversion:
    """A converted model, what was changed in it, and the way back."""

    def __init__(self, model: Any, changes: Sequence[Change], undo: Callable[..., Any]):
        self.model = model
        self.changes = tuple(changes)
        self.undo = undo

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "nothing to convert"


def pairs_of(
    fuse: bool | Mapping[type, Pairs], node: Any, fused_norms: Iterable[type], fused_linears: Iterable[type]
) -> Pairs:
    """What `node` and `fuse` declare and an earlier conversion has not fused: pairs of attribute names, which may be
    dotted.
    """
    if not fuse:
        return ()
    if fuse is True:
        pairs = getattr(type(node), DECLARATION, ())
        _check(pairs, f"{named(type(node))}.{DECLARATION}")
    else:
        pairs = next((fuse[cls] for cls in type(node).__mro__ if cls in fuse), ())
    norms = [norm for norm, _ in pairs]
    if len(set(norms)) != len(norms):
        raise ValueError(f"{named(type(node))} declares a norm in two pairs, and it can feed only one: {pairs}")
    fused = tuple(fused_norms), tuple(fused_linears)
    return [p for p in pairs if any(type(getattr_or_none(node, a)) not in c for a, c in zip(p, fused, strict=True))]


def check_fuse(fuse: Any, nodes: Iterable[Any]) -> None:
    """Raises if `fuse` is malformed, or has pairs for a class of which no node is."""
    if isinstance(fuse, bool):
        return
    if not isinstance(fuse, Mapping) or not all(isinstance(cls, type) for cls in fuse):
        raise TypeError(f"fuse must be a bool or a mapping from classes to pairs; got {fuse!r}")
    for cls, pairs in fuse.items():
        _check(pairs, f"fuse[{named(cls)}]")
    met = {cls for node in nodes for cls in type(node).__mro__}
    if unmet := [named(cls) for cls in fuse if cls not in met]:
        raise ValueError(f"fuse names {', '.join(unmet)}, of which the model has none")


def _check(pairs: Any, name: str) -> None:
    if not isinstance(pairs, Sequence) or not all(
        isinstance(pair, Sequence)
        and len(pair) == 2
        and not isinstance(pair, str)
        and all(isinstance(a, str) for a in pair)
        for pair in pairs
    ):
        raise TypeError(f"{name} must be a list of pairs of attribute names; got {pairs!r}")


def attribute(node: Any, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), node)


def checked_pair(node: Any, pair: tuple[str, str], norms: Sequence[type], linears: Sequence[type]) -> tuple[Any, Any]:
    """The two layers of a pair."""

    def layer(name: str, expected: Sequence[type]) -> Any:
        found = getattr_or_none(node, name)
        if type(found) not in expected:
            wanted = " or ".join(map(named, expected))
            raise ValueError(f"{named(type(node))} declares {name!r} as {wanted}; it is a {named(type(found))}")
        return found

    norm, linear = pair
    return layer(norm, norms), layer(linear, linears)


def getattr_or_none(node: Any, dotted: str) -> Any:
    try:
        return attribute(node, dotted)
    except AttributeError:
        return None


def named(cls: type) -> str:
    """A class as its users write it."""
    framework, _, rest = cls.__module__.partition(".")
    public = {"flax": "flax.nnx" if rest.startswith("nnx") else "flax.linen", "equinox": "equinox.nn"}
    return f"{public.get(framework, cls.__module__)}.{cls.__qualname__}"
