"""The junction's operations: for each its formulas, its kernels, how it is split, and what of its operands it reads."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from jln._core.layout import Layout
from jln._core.operation import Operation
from jln._junction import arrays, formulas, gradients
from jln._junction.arrays import TABLE, Arrays, Junction, Shape
from jln._junction.layout import layout
from jln._junction.linears import formulas as linears
from jln._triton.target import kernels


def _launches(module: str, name: str) -> Any:
    """The kernels of an operation by the function that launches them, which is imported where they run, with Triton."""
    return kernels(lambda: getattr(importlib.import_module(f"jln._junction.{module}"), name))


def _layout_with_linear(operands: Arrays, junction: Junction, dtypes: Arrays, batch_dims: int) -> Layout:
    (features,) = junction.features
    return layout(operands, junction.norm, dtypes, batch_dims, features)


def rows_of(operands: Arrays) -> Arrays:
    """The operands of x's size."""
    return operands.only(name for name, array in TABLE.items() if array.shape is Shape.ROW)


forward: Operation[Arrays, Arrays] = Operation(
    "jln_norm_forward",
    formulas.forward,
    formula_cpu=formulas.forward_cpu,
    formula_tpu=formulas.forward_tpu,
    kernels=_launches("launches", "forward"),
    layout=layout,
    reads=lambda norm, dtypes: arrays.reads_of_results(dtypes),
    rows=rows_of,
)
backward: Operation[Arrays, Arrays] = Operation(
    "jln_norm_backward",
    gradients.backward,
    formula_cpu=gradients.backward_cpu,
    formula_tpu=gradients.backward_tpu,
    kernels=_launches("launches", "backward"),
    layout=layout,
    reads=arrays.reads_of_gradients,
    rows=rows_of,
    before_spread=gradients.with_one_dy,
)
forward_in_one: Operation[Arrays, Arrays] = Operation(
    "jln_norm_linear_forward",
    linears.forward,
    formula_cpu=linears.forward_cpu,
    formula_tpu=linears.forward_tpu,
    kernels=_launches("linears.launches", "forward"),
    layout=_layout_with_linear,
    reads=lambda junction, dtypes: arrays.reads_of_results(dtypes),
    rows=rows_of,
)
backward_in_one: Operation[Arrays, Arrays] = Operation(
    "jln_norm_linear_backward",
    linears.backward,
    formula_cpu=linears.backward_cpu,
    formula_tpu=linears.backward_tpu,
    kernels=_launches("linears.launches", "backward"),
    layout=_layout_with_linear,
    reads=lambda junction, dtypes: arrays.reads_of_gradients(junction.norm, dtypes, with_linears=True),
    rows=rows_of,
)
column_sums: Operation[Arrays, Arrays] = Operation(
    "jln_column_sums",
    linears.column_sums,
    kernels=_launches("linears.launches", "column_sums"),
    layout=_layout_with_linear,
)


def norms_by(implementation: str | None) -> linears.Norms:
    """The norm's operations by themselves, for the products around them."""
    operations = (forward, backward, column_sums)
    return linears.Norms(*(functools.partial(operation, implementation=implementation) for operation in operations))
