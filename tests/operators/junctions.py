"""Arguments of gated norms, of sums with an x_bias and every kind of gate, and parameters by rows."""

import functools

import jln
import workbench
from catalogue import OPERATORS

SHAPE = (3, 4, 5, 8)

# Along which of x's axes of rows, counted among these, a parameter varies; with None it has the normalised axes' shape.
VARIES = {
    "shared": None,
    "by example": (0,),
    "over an axis in the middle": (1,),
    "over the last": (2,),
    "over the outer ones": (0, 2),
    "by row": (0, 1, 2),
}
# The same of a scale, and of an offset that varies along other axes.
APART = {
    "apart": ("by example", "over an axis in the middle"),
    "apart, the offset over two axes": ("over an axis in the middle", "over the outer ones"),
    "apart, the offset by row": ("over the last", "by row"),
}
GATES = {
    "no gate": None,
    "H": ("shared", True),
    "rows": ("by row", False),
    "a row's of each example": ("by example", False),
    "by example": ("by example", True),
    "over an axis in the middle": ("over an axis in the middle", True),
    "over the last": ("over the last", True),
    "one element": (None, False),
    "a number": 0.3,
    "nothing added": None,  # no residual either: total is x
}
# The forms of rms_norm_gated: whether the norm goes before the gate.
GATED = {"the norm first": True, "the gate first": False}


def bound(form, options, module=jln, **more):
    """The operator of a form, of `jln` or of `jln.reference`, with its options."""
    return functools.partial(getattr(module, "rms_norm_gated" if form in GATED else form), **options, **more)


def parameter_shape(shape, axes, varies, of_h=True):
    if varies == "shared":
        return tuple(shape[a] for a in axes)
    rows = [i for i in range(len(shape)) if i not in axes]
    chosen = [rows[i] for i in VARIES.get(varies, ()) if i < len(rows)]
    return tuple(n if i in chosen or (of_h and i in axes) else 1 for i, n in enumerate(shape))


def made(form, *, gate="H", varies="shared", axis=-1, shape=SHAPE, dtype="float64"):
    """Return the arguments of an operator, or of a gated form, by name, and its options.

    A norm of x has a scale of the same shape. gate: its kind. varies: how scale and offset vary over axes of rows.
    """
    operator = OPERATORS["rms_norm_gated" if form in GATED else form]
    of_scale, of_offset = APART.get(varies, (varies, "shared" if varies == "by row" else varies))
    axes = tuple(a % len(shape) for a in (axis if isinstance(axis, tuple) else (axis,)))
    shapes = {"x": shape, "scale": parameter_shape(shape, axes, of_scale)}
    if operator.centres:
        shapes["offset"] = parameter_shape(shape, axes, of_offset)
    more = {"x_scale": shapes["scale"], "residual": shape, "x_bias": parameter_shape(shape, axes, "shared"), "z": shape}
    shapes |= {n: s for n, s in more.items() if n in operator.takes}
    if operator.adds and isinstance(GATES[gate], tuple):
        shapes["gate"] = parameter_shape(shape, axes, *GATES[gate])
    if operator.is_linear:
        shapes |= {"kernel": (shape[-1], 2, shape[-1] // 2), "bias": (2, shape[-1] // 2)}
    options = {} if operator.is_linear else {"axis": axis}
    if form in GATED:
        options["norm_before_gate"] = GATED[form]
    if gate == "nothing added":
        options["residual"] = None
        shapes = {n: s for n, s in shapes.items() if n not in ("residual", "x_bias")}
    if isinstance(GATES[gate], float) and operator.adds:
        options["gate"] = GATES[gate]
    return {n: workbench.normal(i, s, dtype) for i, (n, s) in enumerate(shapes.items())}, options
