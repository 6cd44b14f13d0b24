"""Ways to break few features: a kernel that normalises and multiplies, and Linears of groups on a mesh."""

import targets as t
from targets import Mutant

FEW = "tests/operators/test_few_features.py::"
VALUES = (f"{FEW}test_values_and_every_gradient[add_layer_norm_linear-()]",)
SEVERAL, MANY = (
    (f"{FEW}test_several_programs[90-{cores}-add_layer_norm_linear-400-72-20-float32]",) for cores in (40, 3)
)
ON_A_MESH = (f"{t.SHARDING}test_few_features[layer_norm_linear-no gate-by example-examples]",)
OF_STAGES = ("tests/devices/test_shard_map.py::test_few_features_of_examples_over_some_axes[kernels]",)


def left(what: str) -> tuple[str, ...]:
    return (f"{FEW}test_forms_that_are_left_to_a_norm_and_products[{what}]",)


FEW_FEATURES = [
    Mutant("a part's c2 behind the first part's rows", t.LINEAR_BACKWARD, "c2_ptr + of_part + row, tl.sum",
           "c2_ptr + row, tl.sum", SEVERAL),
    Mutant("dscale of a program's last tile", t.LINEAR_BACKWARD, "tl.fma(dz, x_hat, dscale)", "dz * x_hat", MANY),
    Mutant("dkernel alone without the offset", t.LINEAR_LAUNCH,
           "needs_dbias = dbias or dtypes.offset or (dkernel and operands.offset is not None)",
           "needs_dbias = dbias or dtypes.offset", VALUES),
    Mutant("an offset that the fused launch leaves out", t.LINEAR_LAUNCH,
           "offset=operands.offset if dkernel else None", "offset=None", VALUES),
    Mutant("the total's cotangent forgotten", t.LINEAR_LAUNCH, 'None if dtypes.x is None else operands.dtotal', "None",
           VALUES),
    Mutant("parameters of each example taken for shared ones", t.LINEAR_TILES, "norm.has_groups or norm.both_sides",
           "norm.both_sides", left("parameters of examples")),
    Mutant("statistics that were not kept taken for kept ones", t.LINEAR_TILES, "norm.both_sides or norm.remat",
           "norm.both_sides", left("remat")),
    Mutant("the second Linear forgotten", t.LINEAR_TILES, "or len(operands.kernel) > 1", "", left("second Linear")),
    Mutant("a gate that one kernel does not know", t.LINEAR_TILES, 'FUSED_OPERANDS = {"x", "residual",',
           'FUSED_OPERANDS = {"x", "residual", "gate",', left("gate")),
    Mutant("dkernel of a device's examples alone", t.SHAPES, "over_rows = (Kind.ROW, Kind.BATCH) if norm.has_groups",
           "over_rows = (Kind.ROW,) if norm.of_examples", ON_A_MESH),
    Mutant("dkernel of each of vmap's examples added up over devices", t.PLACEMENT, "Kind.BATCH: own}",
           "Kind.BATCH: set()}", (f"{t.SHARDING}test_few_features_of_examples_under_vmap",)),
    Mutant("shares of the examples on some devices left out", t.PARTITIONED,
           "over = [tuple(a for axes in placement.sum_axes(r) for a in axes) for r in sums]",
           "over = [placement.over(Kind.ROW) for r in sums]", OF_STAGES),
]  # fmt: skip
