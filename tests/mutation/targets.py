"""The record of a mutant, and the names of the files to break and of the tests that must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mutant: in `file`, `old` becomes `new`; `tests` are pytest's node ids, the likeliest to fail first."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ACCESS = "jln/_junction/kernels/addresses.py"
RECORDS = "jln/_junction/kernels/records.py"
COPY = "group = copy_of(group, SHARED, item(NAMES, FIELD), HEADS)"  # where `place` finds a group's part of an array


def first_part_of(name: str) -> str:
    """COPY with the first group's part of one array for all groups."""
    return f'{COPY}\n    group *= item(NAMES, FIELD) != "{name}"'


def shared_as_dy(name: str) -> str:
    """COPY with one array taken for shared where dy is."""
    return COPY.replace("item(NAMES, FIELD)", f'"dy" if item(NAMES, FIELD) == "{name}" else item(NAMES, FIELD)')


TERMS = "jln/_junction/kernels/terms.py"
FORWARD = "jln/_junction/kernels/forward.py"
BACKWARD = "jln/_junction/kernels/backward.py"
LINEAR = "jln/_junction/kernels/with_linear.py"
LINEAR_BACKWARD = "jln/_junction/kernels/with_linear_backward.py"
NORM_LAUNCH = "jln/_junction/launches.py"
GEOMETRY = "jln/_junction/geometry.py"
JUNCTION_RULES = "jln/_junction/derivatives.py"
OPERATIONS = "jln/_junction/operations.py"
XLA_GRADIENTS = "jln/_junction/gradients.py"
TANGENTS = "jln/_junction/tangents.py"
LAUNCH = "jln/_triton/launch.py"
LOWERING = "jln/_triton/lowering.py"
CACHE = "jln/_triton/cache.py"
LINEAR_LAUNCH = "jln/_junction/linears/launches.py"
XLA_NORM = "jln/_junction/formulas.py"
XLA_EIGHT_BITS = "jln/_junction/eight_bits.py"
XLA_LINEAR = "jln/_junction/linears/formulas.py"
OPERATION = "jln/_core/operation.py"
DERIVATIVES = "jln/_core/derivatives.py"
LAYOUT = "jln/_core/layout.py"
PLACEMENT = "jln/_core/placement.py"
PARTITIONED = "jln/_core/partition.py"
ARRAYS = "jln/_junction/arrays.py"
SHAPES = "jln/_junction/layout.py"
LINEAR_TILES = "jln/_junction/linears/tiles.py"
NORM_ARGUMENTS = "jln/_junction/arguments.py"
VMAPS = "jln/_junction/vmaps.py"
CHECK = "jln/testing/check.py"
ROW_TERMS = "jln/_junction/kernels/row_terms.py"
NORM_TILES = "jln/_junction/tiles.py"
LIMITS = "jln/testing/operators.py"
REFERENCE = "jln/reference.py"
ROUTES = "jln/_routes.py"

ACCURACY = "tests/operators/test_accuracy.py::"
OPERATORS = "tests/operators/test_operators.py::"
TRANSFORMED = "tests/transformations/test_transforms.py::"
LINEARS = "tests/operators/test_linear_accuracy.py::"
SEVERAL = "tests/operators/test_several_linears.py::"
ABUSE = "tests/operators/test_abuse.py::"
MATRIX = "tests/transformations/test_matrix.py::"
FROZEN = "tests/transformations/test_frozen.py::"
RESULT_DTYPE = "tests/operators/test_result_dtype.py::"
ARRAY_TABLE = "tests/operators/test_arrays.py::"
SHARDING = "tests/devices/test_sharding.py::"
EXPLICIT = "tests/devices/test_shard_map.py::"
SEQUENCE = "tests/devices/test_sequence_parallelism.py::"
JUNCTION = "tests/operators/test_junction.py::"
JUNCTION_COSTS = "tests/operators/test_junction_costs.py::"
EXECUTED = "tests/executed/"
PROGRAM = "tests/program/"
CACHED = "tests/triton/test_cache.py::"

# Whole rows, several a tile and the last one ragged; a row in chunks.
WHOLE = (f"{ACCURACY}test_family[triton-37-100-add_layer_norm-float32]",)
MANY_TILES = (f"{ACCURACY}test_layer_norm[triton-1000-127-float32]",)
CHUNKS = (f"{ACCURACY}test_layer_norm[triton-5-16385-float32]",)
CHUNKS_ADD = (f"{ACCURACY}test_family[triton-2-40000-add_layer_norm-float32]",)
GROUPS = (
    f"{TRANSFORMED}test_vmap_of_grad_in_every_regime[(None, None, 0, 0)-shape0]",
    f"{TRANSFORMED}test_vmap_of_grad_in_every_regime[(0, 0, None, 0)-shape1]",
)
# Several tiles of rows a program, all ragged, and of features; several chunks of H; as many features as there may be.
FUSED_KERNELS = (
    f"{LINEARS}test_sizes[triton-300-60-7-float16]",
    f"{LINEARS}test_sizes[triton-64-128-64-float16]",
    f"{LINEARS}test_sizes[triton-333-100-256-bfloat16]",
)
FUSED_SUM = (f"{LINEARS}test_behind_a_sum[bfloat16-bfloat16-fused]",)
# In float32, as in float64 norm and products are apart.
COMPOSED = (f"{LINEARS}test_sizes[triton-33-100-300-float16]",)
XLA = (f"{ACCURACY}test_family[xla-37-100-add_layer_norm-float32]",)
XLA_LINEARS = (f"{LINEARS}test_sizes[xla-64-128-64-float32]", f"{LINEARS}test_sizes[xla-333-8-7-float32]")
# Compiled kernels, executed: ragged rows; a row of one element; several dtypes; several tiles; a fused pair.
RAGGED = (
    f"{EXECUTED}test_norms.py::test_norms[layer_norm-19x100-bfloat16-small-a100-zero_centered_scale=True-epsilon=0.5]",
)
ONE_ROW = (f"{EXECUTED}test_norms.py::test_norms[layer_norm-1x1-float32-h200]",)
TWO_DTYPES = (
    f"{EXECUTED}test_norms.py::test_norms[add_layer_norm-37x1024-bfloat16-small-h200-parameters=float32-"
    "residual=float32]",
)
SEVERAL_TILES = (f"{EXECUTED}test_norms.py::test_norms[add_layer_norm-29x1000-float32-small-l4]",)
EXECUTED_FUSED = (f"{EXECUTED}test_linears.py::test_fused[layer_norm_linear-333x128-bfloat16-small-h200-features=64]",)
