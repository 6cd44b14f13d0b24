"""The common part of conversions of every framework."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jln._modules import Recipe, computed_by_recipe, described_by

_BY_RECIPE = "_jln_by_recipe"

# A norm, and the Linear or the Linears that read its result, by the names of a block's attributes.
Pairs = Sequence[tuple[str, str | Sequence[str]]]
Fuse = bool | Mapping[type, Pairs]

WHY_SWAPPED = "swapped"
WHY_LINEAR = "where it reads a norm's result it keeps what the norm read instead"
WHERE_CALLED = ", if its own call makes the framework's"
WHY_RECIPE = "as its recipe says"
HINT = (
    'jln does not know what it computes; tell it by norms={{{0}: lambda m: dict(kind="rms_norm", scale={1}, '
    "epsilon=m.epsilon)}}"
)


class Change(NamedTuple):
    """A change of one layer by a conversion.

    Attributes:
      path: where the layer is in the model.
      before: its class before.
      after: its class after; empty for a layer that was left as it was.
      why: the reason, in a few words.
    """

    path: str
    before: str
    after: str
    why: str

    def __str__(self) -> str:
        what = f"{self.before} -> {self.after}" if self.after else f"{self.before} left"
        return f"{self.path or 'model'}: {what} ({self.why})"


class Conversion:
    """A converted model, what was changed in it, and the way back; `str()` of it lists the changes.

    Attributes:
      model: the converted model.
      changes: a `Change` for each layer that was changed, or left for a reason.
      undo: gives the layers their former classes back; `nnx` and `equinox` say how it is called.
    """

    def __init__(self, model: Any, changes: Sequence[Change], undo: Callable[..., Any]):
        self.model = model
        self.changes = tuple(changes)
        self.undo = undo

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "nothing to convert"


def fused_linears(fuse: Fuse, nodes: Iterable[Any], norms: tuple[type, ...], linears: tuple[type, ...]) -> list[Any]:
    """The Linears that `fuse` names, among all nodes of a model.

    Raises:
      TypeError: `fuse` is malformed.
      ValueError: what it names is not there, or is something else.
    """
    nodes = list(nodes)
    if isinstance(fuse, bool):
        return [node for node in nodes if fuse and isinstance(node, linears)]
    if not isinstance(fuse, Mapping) or not all(isinstance(cls, type) for cls in fuse):
        raise TypeError(f"fuse must be a bool or a mapping from classes to pairs; got {fuse!r}")
    pairs = {cls: _checked(pairs, f"fuse[{named(cls)}]") for cls, pairs in fuse.items()}
    found: list[Any] = []
    met: set[type] = set()
    for node in nodes:
        cls = next((cls for cls in type(node).__mro__ if cls in pairs), None)
        met.update(type(node).__mro__)
        for norm, of_norm in pairs[cls] if cls is not None else ():
            _layer(node, norm, norms)
            found += [_layer(node, linear, linears) for linear in of_norm]
    if unmet := [named(cls) for cls in fuse if cls not in met]:
        raise ValueError(f"fuse names {', '.join(unmet)}, of which the model has none")
    return found


def _checked(pairs: Any, name: str) -> list[tuple[str, tuple[str, ...]]]:
    """The pairs of a norm's name and a tuple of Linears' names. Raises TypeError where `pairs` is malformed."""

    def is_sequence(a: Any) -> bool:
        return isinstance(a, Sequence) and not isinstance(a, str)

    def is_pair(pair: Any) -> bool:
        if not is_sequence(pair) or len(pair) != 2 or not isinstance(pair[0], str):
            return False
        return isinstance(pair[1], str) or (is_sequence(pair[1]) and all(isinstance(a, str) for a in pair[1]))

    if not is_sequence(pairs) or not all(map(is_pair, pairs)):
        wanted = "a list of pairs, of a norm's name and a Linear's or a tuple of these"
        raise TypeError(f"{name} must be {wanted}; got {pairs!r}")
    return [(norm, (linears,) if isinstance(linears, str) else tuple(linears)) for norm, linears in pairs]


def _layer(node: Any, name: str, expected: tuple[type, ...]) -> Any:
    found = attribute(node, name)
    if not isinstance(found, expected):
        wanted = " or ".join(dict.fromkeys(map(named, expected)))
        raise ValueError(f"fuse names {name!r} of {named(type(node))} as {wanted}; it is a {named(type(found))}")
    return found


def attribute(node: Any, path: str) -> Any:
    """A part of a node by a path as a conversion prints it, `mlp.layers[0]`; None where there is nothing."""

    def step(a: Any, name: str) -> Any:
        try:
            return a[_key(name)] if name.startswith("[") else getattr(a, name)
        except (AttributeError, LookupError, TypeError):
            return None

    return functools.reduce(step, re.findall(r"\[[^]]*\]|[^.[]+", path), node)


def _key(bracketed: str) -> Any:
    inner = bracketed[1:-1]
    return int(inner) if inner.lstrip("-").isdigit() else inner.strip("'\"")


class Swap(NamedTuple):
    """A class for a layer.

    cls: the class, None if the layer keeps its own. name: what that is called. why: the reason; "" where there is
      nothing to be said.
    """

    cls: type | None
    name: str
    why: str


class Classes(NamedTuple):
    """The classes of a framework with jln's in their place, and by a recipe those of a model's own norms.

    placed: `placed(layer, cls)`, how `explain` lists a layer of that class.
    """

    framework: str
    norms: Mapping[type, type]
    linears: Mapping[type, type]
    placed: Callable[[Any, str], str]

    def of(self, layer: Any, recipes: Mapping[type, Recipe], is_fused: bool) -> Swap:
        cls = type(layer)
        known = {**self.norms, **(self.linears if is_fused else {})}
        if cls.__dict__.get(_BY_RECIPE) or issubclass(cls, tuple(known.values())):
            return Swap(None, "", "")
        if (recipe := next((recipes[c] for c in cls.__mro__ if c in recipes), None)) is not None:
            described_by(recipe, layer)
            return Swap(_by_recipe(cls, recipe, self.placed), "jln", WHY_RECIPE)
        for theirs, own in known.items():
            why = WHY_SWAPPED if theirs in self.norms else WHY_LINEAR
            if cls is theirs:
                return Swap(own, named(own), why)
            if issubclass(cls, theirs):
                before = cls.__mro__[: cls.__mro__.index(theirs)]
                has_own = any("__call__" in vars(c) for c in before)
                return Swap(_subclass(cls, own), named(own), why + WHERE_CALLED * has_own)
        return Swap(None, "", hint_for(cls, self.framework))


@functools.cache
def _subclass(cls: type, of: type) -> type:
    """A subclass of a framework's layer in which the call that it inherits, or makes by `super()`, is `of`'s."""
    return type(cls)(cls.__name__, (cls, of), _like(cls, _subclass, of))


@functools.cache
def _by_recipe(cls: Any, recipe: Recipe, placed: Callable[[Any, str], str]) -> type:
    """A subclass of a model's own norm whose call is the recipe's."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(cls.__call__, self)
        return computed_by_recipe(placed(self, named(cls)), recipe, self, plain, args, kwargs)

    made = {"__call__": __call__, _BY_RECIPE: True}
    return type(cls)(cls.__name__, (cls,), {**_like(cls, _by_recipe, recipe, placed), **made})


def _like(cls: type, make: Callable[..., type], *how: Any) -> dict[str, Any]:
    """The attributes that a class made by `make(cls, *how)` has from `cls`.

    Its name is that of `cls`, by which pickle would find the wrong class: so it has a method for pickle too.
    """

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = super(type(self), self).__reduce_ex__(protocol)
        if isinstance(reduced, str) or reduced[1][:1] != (type(self),):  # by a method of the model's own
            return reduced
        new, (_, *args), *state = reduced
        return _unpickled, (make, (cls, *how), new, args), *state

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return {**names, "__reduce_ex__": __reduce_ex__}


def _unpickled(make: Callable[..., type], how: Any, new: Callable[..., Any], args: Any) -> Any:
    return new(make(*how), *args)


def hint_for(cls: type, framework: str, parameter: str = "m.scale") -> str:
    """A hint for a class of somebody's own that is named as norms are: to give it a recipe; "" for any other class."""
    is_known = cls.__module__.partition(".")[0] in (framework, "jln")
    return "" if is_known or not cls.__name__.endswith("Norm") else HINT.format(cls.__name__, parameter)


def named(cls: type) -> str:
    """A class as its users write it."""
    framework, _, rest = cls.__module__.partition(".")
    public = {"flax": "flax.nnx" if rest.startswith("nnx") else "flax.linen", "equinox": "equinox.nn"}
    return f"{public.get(framework, cls.__module__)}.{cls.__qualname__}"
