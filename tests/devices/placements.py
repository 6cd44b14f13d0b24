"""Ways of splitting every operator's arguments over a mesh of eight devices, by their roles.

A file of tests that imports this one is skipped where there are fewer devices.
"""

import functools

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from catalogue import FORMS
from matrix import OPTIONAL, bind, gradient, operands

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
LINEAR = [name for name, o in FORMS.items() if o.is_linear]

# How the arguments are split over the mesh, by their roles.
ROWS = {"activation": P("data")}
PLACEMENTS = {
    "rows": ROWS,
    "rows over both axes": {"activation": P("data", "tensor")},
    "parameters stored in parts": ROWS
    | {"scale": P("data"), "offset": P("tensor"), "kernel": P("data"), "bias": P("tensor")}
    | {"x_bias": P("tensor"), "gate": P("data")},
    "H": {"activation": P("data", None, "tensor")}
    | dict.fromkeys(("scale", "offset", "x_bias", "gate", "kernel"), P("tensor")),
    "H of x alone": {"activation": P(None, None, "data")},
    "columns": {"kernel": P(None, "tensor"), "bias": P("tensor")},
    "rows and columns": {**ROWS, "kernel": P(None, "tensor"), "bias": P("tensor")},
    "rows and columns, kernel stored in parts": {**ROWS, "kernel": P("data", "tensor"), "bias": P("tensor")},
    "features stored in parts": {**ROWS, "kernel": P(None, None, "data"), "bias": P(None, "data")},
}
COLUMNS = [p for p in PLACEMENTS if "columns" in p or "features" in p]
CASES = [(n, p) for n in OPTIONAL for p in PLACEMENTS if n in LINEAR or p not in COLUMNS]


def by_role(name, split):
    """Return how each argument of an operator is split, by its name."""
    roles = {a.name: a.role for a in FORMS[name].arguments} | {"x_bias": "x_bias"}  # not placed as a Linear's bias
    return {n: split.get(roles[n], P()) for n in operands(name)}


def put(arrays, specs, on):
    """Return the arrays by name on a mesh, those without a spec whole on every device."""

    def places(name):
        return jax.tree.map(lambda spec: NamedSharding(on, spec), specs.get(name, P()))

    return {n: jax.device_put(a, places(n)) for n, a in arrays.items()}


def placed(name, placement, on):
    """Return the operator as a function, its operands, and its operands on the mesh."""
    function, arrays = bind(name, OPTIONAL[name])
    return function, arrays, tuple(put(operands(name), by_role(name, PLACEMENTS[placement]), on).values())


@functools.cache
def reference(name):
    """Return the gradients of the reference on one device."""
    function, arrays = bind(name, OPTIONAL[name], jln.reference)
    return jax.jit(gradient(function, arrays))(*arrays)
