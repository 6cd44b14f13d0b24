"""The junction's operations: for each its formulas, its kernels, how it is split, and what of its operands it reads."""

from __future__ import annotations

import functools
from typing import Any

from jln._core.operation import Operation
from jln._junction import arrays, formulas, gradients, shapes
from jln._junction.arrays import TABLE, Arrays, Shape
from jln._junction.linears import formulas as linears
from jln._triton.target import kernels


def _launches():
    from jln._junction import launches

    return launches


def _launches_with_linears():
    from jln._junction.linears import launches

    return launches


def _of_features(function: Any) -> Any:
    """A function of the norm and the Linears' features, as one of the junction."""
    return lambda operands, junction, dtypes, batch_dims: function(
        operands, junction.norm, dtypes, batch_dims, junction.features
    )


def rows_of(operands: Arrays) -> Arrays:
    """The operands of x's size."""
    return operands.only(name for name, array in TABLE.items() if array.shape is Shape.ROW)


forward: Operation[Arrays, Arrays] = Operation(
    "jln_norm_forward",
    formulas.forward,
    formula_cpu=formulas.forward_cpu,
    formula_tpu=formulas.forward_tpu,
    kernels=kernels(lambda: _launches().forward),
    layout=shapes.layout,
    shapes=shapes.result_shapes,
    reads=lambda norm, dtypes: arrays.reads_of_results(dtypes),
    rows=rows_of,
)
backward: Operation[Arrays, Arrays] = Operation(
    "jln_norm_backward",
    gradients.backward,
    formula_cpu=gradients.backward_cpu,
    formula_tpu=gradients.backward_tpu,
    kernels=kernels(lambda: _launches().backward),
    layout=shapes.layout,
    shapes=shapes.result_shapes,
    reads=arrays.reads_of_gradients,
    rows=rows_of,
    before_spread=gradients.with_one_dy,
)
forward_in_one: Operation[Arrays, Arrays] = Operation(
    "jln_norm_linear_forward",
    linears.forward,
    formula_cpu=linears.forward_cpu,
    formula_tpu=linears.forward_tpu,
    kernels=kernels(lambda: _launches_with_linears().forward),
    layout=_of_features(shapes.layout),
    shapes=_of_features(shapes.result_shapes),
    reads=lambda junction, dtypes: arrays.reads_of_results(dtypes),
    rows=rows_of,
)
backward_in_one: Operation[Arrays, Arrays] = Operation(
    "jln_norm_linear_backward",
    linears.backward,
    formula_cpu=linears.backward_cpu,
    formula_tpu=linears.backward_tpu,
    kernels=kernels(lambda: _launches_with_linears().backward),
    layout=_of_features(shapes.layout),
    shapes=_of_features(shapes.result_shapes),
    reads=lambda junction, dtypes: arrays.reads_of_gradients(junction.norm, dtypes, with_linears=True),
    rows=rows_of,
)
column_sums: Operation[Arrays, Arrays] = Operation(
    "jln_column_sums",
    linears.column_sums,
    kernels=kernels(lambda: _launches_with_linears().column_sums),
    layout=_of_features(shapes.layout),
    shapes=_of_features(shapes.result_shapes),
)


def norms_by(implementation: str | None) -> linears.Norms:
    """The norm's operations by themselves, for the products around them."""
    operations = (forward, backward, column_sums)
    return linears.Norms(*(functools.partial(operation, implementation=implementation) for operation in operations))
