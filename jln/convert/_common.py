"""What a conversion is, whatever the framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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


def pairs_of(fuse: bool | Mapping[type, Pairs], node: Any) -> Pairs:
    """What `node` and `fuse` declare: pairs of attribute names, which may be dotted."""
    if not fuse:
        return ()
    pairs = getattr(type(node), DECLARATION, ()) if fuse is True else fuse.get(type(node), ())
    norms = [norm for norm, _ in pairs]
    if len(set(norms)) != len(norms):
        raise ValueError(f"{named(type(node))} declares a norm in two pairs, and it can feed only one: {pairs}")
    return pairs


def attribute(node: Any, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), node)


def checked_pair(node: Any, pair: tuple[str, str], norms: Sequence[type], linears: Sequence[type]) -> tuple[Any, Any]:
    """The two layers of a pair."""
    found = []
    for name, expected in zip(pair, (norms, linears), strict=True):
        layer = getattr_or_none(node, name)
        if type(layer) not in expected:
            wanted = " or ".join(map(named, expected))
            raise ValueError(f"{named(type(node))} declares {name!r} as {wanted}; it is a {named(type(layer))}")
        found.append(layer)
    return found[0], found[1]


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
