"""The launches that operators would make at any size, for the tests that compile them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jln._junction.arrays import DY, Arrays, Junction, Norm, Shape, Switches
from jln._triton.chip import CHIPS as ALL_CHIPS
from jln._triton.target import Recorder

# One of each architecture: an H100 has the kernels of an H200, and an L40S, but for Linears, those of an L4.
CHIPS = ("a100", "l4", "h200", "b200")
# x's, the residual's, the parameters'.
DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    "float16": ("float16", "float16", "float16"),
    "float32": ("float32", "float32", "float32"),
    "float64": ("float64", "float64", "float64"),
    "bfloat16, float32 parameters": ("bfloat16", "bfloat16", "float32"),
    "bfloat16, float32 stream": ("bfloat16", "float32", "float32"),
    "float16, bfloat16 stream": ("float16", "bfloat16", "float32"),
}

# The most of everything, the least, and what most models have.
SWITCHES = {
    "add_rms_norm": {
        "adds": True,
        "subtract_mean": False,
        "zero_centered_scale": False,
        "scale": True,
        "offset": False,
    },
    "everything": {"adds": True, "subtract_mean": True, "zero_centered_scale": True, "scale": True, "offset": True},
    "nothing": {"adds": False, "subtract_mean": False, "zero_centered_scale": False, "scale": False, "offset": False},
}
# With what few models have.
SUM_SWITCHES = {
    "everything and x_bias": SWITCHES["everything"] | {"x_bias": True},
    "everything and a gate": SWITCHES["everything"] | {"x_bias": True, "gate": True},
}
# With z: what is silu(z) times the norm's result, and the norm of silu(z) times x.
_GATED = SWITCHES["add_rms_norm"] | {"adds": False}
GATED_SWITCHES = {
    "the norm before its gate": _GATED | {"z": True},
    "the gate before the norm": _GATED | {"x_z": True},
}
# Of whose Linears the backward pass makes total and its statistics again, and the norm's result.
REMAT_SWITCHES = {
    "a sum again": SWITCHES["add_rms_norm"] | {"remat": True},
    "everything again": SWITCHES["everything"] | {"remat": True},
    "everything and a gate again": SUM_SWITCHES["everything and a gate"] | {"remat": True},
    "statistics again": SWITCHES["everything"] | {"adds": False, "remat": True},
}
# In front of three Linears, whose backward pass adds up what they pull back, with the norm's result and without.
SEVERAL_SWITCHES = {
    "three products": SWITCHES["everything"] | {"products": 3, "y": True},
    "three products, a sum again": REMAT_SWITCHES["a sum again"] | {"products": 3},
    "three products of frozen kernels": SWITCHES["everything"] | {"adds": False, "products": 3},
    "two products": SWITCHES["add_rms_norm"] | {"adds": False, "products": 2, "y": True},
}
# Of examples: more than there are cores, so that one program has all rows of each. Of heads, and of several examples.
EXAMPLES_SWITCHES = {
    "examples": SWITCHES["everything"] | {"adds": False, "examples": 400},
    "examples of a sum": SWITCHES["everything"] | {"examples": 400},
    "examples of a sum again": REMAT_SWITCHES["everything again"] | {"examples": 400},
    "examples and a gate": SUM_SWITCHES["everything and a gate"] | {"examples": 400},
    "heads": SWITCHES["add_rms_norm"] | {"adds": False, "heads": 12},
    "heads of a sum and examples": SWITCHES["everything"] | {"examples": 4, "heads": 3},
}
# Norms on both sides of a sum.
BOTH_SIDES_SWITCHES = {
    "rms norms": SWITCHES["add_rms_norm"] | {"zero_centered_scale": True},
    "rms norms and a gate": SWITCHES["add_rms_norm"] | {"gate": True},
    "nothing": SWITCHES["nothing"],
    "rms norms, three products": SWITCHES["add_rms_norm"] | {"products": 3},
}


def dealt(firsts, dtypes, sizes):
    """Return (first, dtype, sizes) as pytest parameters. The firsts are names of switches, or chips.

    By default the dtypes share the sizes, so that each first has each size once. Every size in every dtype is heavy.
    """
    made = []
    for i, first in enumerate(firsts):
        for j, dtype in enumerate(dtypes):
            share = sizes[(i + j) % len(dtypes) :: len(dtypes)]
            made.append(pytest.param(first, dtype, share, id=f"{first}-{dtype}-its share"))
            made.append(pytest.param(first, dtype, sizes, id=f"{first}-{dtype}-all", marks=pytest.mark.heavy))
    return made


def dealt_on(chip, chips, dtypes, sizes, rarer=()):
    """Return (chip, dtype, sizes) as pytest parameters: those of one chip by `dealt`, all others heavy.

    rarer: more dtypes, heavy on every chip.
    """
    others = [(c, d, sizes) for c in chips for d in (*dtypes, *rarer) if c != chip or d in rarer]
    return dealt([chip], dtypes, sizes) + [
        pytest.param(*other, id=f"{other[0]}-{other[1]}", marks=pytest.mark.heavy) for other in others
    ]


def dtypes_of(arrays):
    """The names of the arrays' dtypes."""
    return jax.tree.map(lambda a: a.dtype.name, arrays)


def launches(h, dtypes, chip, switches):
    """The launches of forward and backward at this size, none made.

    With `examples`, and with `heads`, there are that many groups of rows, each with parameters of its own. With
    `products` y has as many cotangents, with `y` it is made again.
    """
    from jln._junction import launches as launcher

    jax.config.update("jax_enable_x64", True)
    examples, heads = switches.get("examples", 0), switches.get("heads", 0)
    lead = (examples, 100_000 // examples) if examples else (100_000,)
    shape = (*lead, *[heads] * bool(heads), h)
    x = jax.ShapeDtypeStruct(shape, dtypes[0])
    residual = jax.ShapeDtypeStruct(shape, dtypes[1]) if switches["adds"] else None
    y = x if len(dtypes) == 3 else jax.ShapeDtypeStruct(shape, dtypes[3])
    total = x if residual is None else jax.ShapeDtypeStruct(shape, jnp.promote_types(*dtypes[:2]))
    static = Switches(**{n: switches[n] for n in Switches._fields if n in switches})
    norm = Norm(-1, 1e-6, static, examples=int(examples > 0), heads=heads > 0)
    parameter = jax.ShapeDtypeStruct(norm.sizes(Shape.COLUMN, shape, 0), dtypes[2])
    rstd = jax.ShapeDtypeStruct((*shape[:-1], 1), jnp.promote_types(total.dtype, jnp.float32))
    mean = rstd if switches["subtract_mean"] else None
    parameters = {name: parameter for name in ("scale", "offset", "x_bias", "gate") if switches.get(name)}
    gated = "gate" in parameters
    gates = {name: x for name in ("z", "x_z") if switches.get(name)}
    dtotal = None if residual is None else total
    recorder = Recorder(ALL_CHIPS[chip])
    results = dtypes_of(Arrays(y=y, total=dtotal, mean=mean, rstd=rstd))
    operands = Arrays(x, residual, **parameters, **gates)
    jax.eval_shape(lambda operands: launcher.forward(operands, norm, results, 0, recorder), operands)
    gradients = Arrays(x if gated else total, residual if gated else None, **parameters, **gates)
    read = {"x": x} | parameters if gated else {"scale": parameters.get("scale")}
    operands = Arrays(dy=y, dtotal=dtotal, total=total, mean=mean, rstd=rstd, **{**read, "offset": None}, **gates)
    if switches.get("remat"):  # with a cotangent of total in any case, as where x is handed on
        norm, gradients = dataclasses.replace(norm, remat=True), gradients._replace(y=y)
        summands = {name: a for name, a in parameters.items() if name != "offset" or switches["subtract_mean"]}
        operands = Arrays(dy=y, dtotal=total, x=x, residual=residual, **summands)
    gradients = gradients._replace(y=y) if switches.get("y") else gradients
    operands = operands._replace(**dict.fromkeys(DY[: switches.get("products", 1)], y))
    jax.eval_shape(lambda operands: launcher.backward(operands, norm, dtypes_of(gradients), 0, recorder), operands)
    return recorder.launches


def both_sides_launches(h, dtypes, chip, switches, wants_y=False):
    """The launches of an RMSNorm on both sides of a sum forward and backward at this size, none made.

    wants_y: whether the backward pass makes the norm's result again, as the Linears behind it need.
    """
    from jln._junction import launches as launcher

    jax.config.update("jax_enable_x64", True)
    x, residual = (jax.ShapeDtypeStruct((100_000, h), d) for d in dtypes[:2])
    total = jax.ShapeDtypeStruct(x.shape, jnp.promote_types(*dtypes[:2]))
    x_rstd, rstd = (jax.ShapeDtypeStruct((100_000, 1), jnp.promote_types(a.dtype, "float32")) for a in (x, total))
    norm = Norm(-1, 1e-6, Switches(False, switches["zero_centered_scale"]), both_sides=True)
    names = ["scale", "x_scale"] * switches["scale"] + ["gate"] * switches.get("gate", False)
    parameters = dict.fromkeys(names, jax.ShapeDtypeStruct((1, h), dtypes[2]))
    statistics = {"rstd": rstd, "x_rstd": x_rstd}
    recorder = Recorder(ALL_CHIPS[chip])
    operands = Arrays(x=x, residual=residual, **parameters)
    results = dtypes_of(Arrays(y=x, total=total, **statistics))
    jax.eval_shape(lambda operands: launcher.forward(operands, norm, results, 0, recorder), operands)
    gradients = dtypes_of(operands)._replace(y=x.dtype.name if wants_y else None)
    saved = Arrays(x=x, total=total, dy=x, dtotal=total, **parameters, **statistics)
    saved = saved._replace(**dict.fromkeys(DY[: switches.get("products", 1)], x))
    jax.eval_shape(lambda saved: launcher.backward(saved, norm, gradients, 0, recorder), saved)
    return recorder.launches


# LayerNorm+Linear: x's, the kernel's, the norm parameters'.
LINEAR_DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16", "float32"),
    "float16": ("float16", "float16", "float16"),
    "float32": ("float32", "float32", "float32"),
    "float64": ("float64", "float64", "float64"),
    "bfloat16, float32 parameters": ("bfloat16", "float32", "float32"),
    "float32, bfloat16 kernel": ("float32", "bfloat16", "float32"),
    "float16, bfloat16 kernel": ("float16", "bfloat16", "float32"),
}

# M, H, N. Fused: each power of 2 that a product is padded to, with aligned rows of x and dy and without; one chunk and
# many; few rows, whose columns several programs share.
FUSED = [
    (100_000, 4096, 256),
    (100_000, 1000, 136),
    (100_000, 8192, 128),
    (100_000, 4096, 64),
    (100_000, 1023, 7),
    (64, 512, 128),
]


def linear_launches(rows, h, n, dtypes, chip, switches):
    """The launches of LayerNorm+Linear forward and backward at this size, none made; a residual has x's dtype.

    Without parameters nothing is kept, as in front of a backward pass that wants dx alone.
    """
    from jln._junction.linears import launches as launcher

    jax.config.update("jax_enable_x64", True)
    x = jax.ShapeDtypeStruct((rows, h), dtypes[0])
    parameter = jax.ShapeDtypeStruct((1, h), dtypes[2])
    kernel, bias = (jax.ShapeDtypeStruct(s, dtypes[1]) for s in ((h, n), (n,)))
    dy = jax.ShapeDtypeStruct((rows, n), jnp.promote_types(*dtypes[:2]))
    rstd = jax.ShapeDtypeStruct((rows, 1), jnp.promote_types(dtypes[0], jnp.float32))
    mean = rstd if switches["subtract_mean"] else None
    parameters = {name: parameter for name in ("scale", "offset") if switches[name]}
    residual = x if switches["adds"] else None  # total and its cotangent are alike
    norm = Norm(-1, 1e-6, Switches(switches["subtract_mean"], switches["zero_centered_scale"]))
    junction = Junction(norm, features=(1,), in_one=True)
    recorder = Recorder(ALL_CHIPS[chip])
    operands = Arrays(x, residual, **parameters, kernel=(kernel,), bias=(bias if parameters else None,))
    results = Arrays(y=(dy,), total=residual)
    if parameters:
        results = results._replace(mean=mean, rstd=rstd)
    jax.eval_shape(lambda operands: launcher.forward(operands, junction, dtypes_of(results), 0, recorder), operands)
    saved = Arrays(dy=(dy,), dtotal=residual, total=x, mean=mean, rstd=rstd, kernel=(kernel,), **parameters)
    gradients = dtypes_of(operands._replace(residual=None))
    jax.eval_shape(lambda saved: launcher.backward(saved, junction, gradients, 0, recorder), saved)
    return recorder.launches
