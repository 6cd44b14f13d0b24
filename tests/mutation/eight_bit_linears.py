"""Ways to break Linears in eight bits."""

import targets as t
from targets import Mutant

PRODUCTS = "jln/_junction/linears/eight_bits.py"
DERIVATIVES = "jln/_junction/derivatives.py"
TESTS = "tests/operators/test_linears_in_eight_bits.py::"
RECIPE = tuple(
    f"{TESTS}test_values_and_gradients_by_the_recipe[xla-{case}-float32]"
    for case in (
        "layer_norm_linear-blocks-parts of blocks",
        "layer_norm_linear-given scale-blocks over axes of rows",
        "layer_norm_linear-blocks of e5m2-whole blocks",
    )
)
ROW = (f"{TESTS}test_layouts_for_cudnn[a row without others]",)
VMAP = tuple(f"{TESTS}test_vmap_is_a_loop[xla-{how}]" for how in ("given scale", "current scale"))
DELAYED = (f"{TESTS}test_delayed_scaling",)

EIGHT_BIT_LINEARS = [
    Mutant("a bias that is not added to eight bits", PRODUCTS, "if bias is not None:", "if False:", RECIPE),
    Mutant("a row without others", PRODUCTS, "a if a.ndim > others else a[None]", "a", ROW),
    Mutant("a kernel in e5m2", PRODUCTS, 'KERNEL = "float8_e4m3fn"', 'KERNEL = "float8_e5m2"', RECIPE),
    Mutant("cotangents by one scale in e4m3", PRODUCTS, '"one": "float8_e5m2"', '"one": "float8_e4m3fn"', RECIPE),
    Mutant("cotangents in blocks in e5m2", PRODUCTS, '"blocks": "float8_e4m3fn"', '"blocks": "float8_e5m2"', RECIPE),
    Mutant("z in blocks of float8_e4m3fn whatever was asked for", PRODUCTS, "_along_rows(z, 1, junction.y_dtype,",
           "_along_rows(z, 1, KERNEL,",
           (f"{TESTS}test_values_and_gradients_by_the_recipe"
            "[xla-layer_norm_linear-given scale of e5m2-whole blocks-float32]",)),
    Mutant("z made again by a scale of its own", PRODUCTS,
           "None if operands.y_scale is None else operands.y_scale.reshape(())", "None", RECIPE),
    Mutant("blocks that do not end with zeros", PRODUCTS, "for i in range(a.ndim)])",
           'for i in range(a.ndim)], mode="edge")', RECIPE),
    Mutant("the largest of a block by its sign", PRODUCTS, "jnp.max(jnp.abs(blocks), axis)", "jnp.max(blocks, axis)",
           RECIPE),
    Mutant("z by the norm's backward kernel, not where it is quantised", t.XLA_LINEAR,
           'z_dtype = "float32" if norm.remat else None', 'z_dtype = "float32"',
           (f"{TESTS}test_xla_makes_z_again_where_it_quantises_it",)),
    Mutant("z in 16 bits in front of eight", t.XLA_LINEAR, 'z_dtype = "float32" if norm.remat else None',
           "z_dtype = z_dtype if norm.remat else None", (f"{TESTS}test_xla_makes_z_again_where_it_quantises_it",)),
    Mutant("z of rows that are not centred", t.XLA_LINEAR,
           "operands.offset, operands.mean, operands.rstd\n            z =",
           "operands.offset, None, operands.rstd\n            z =", RECIPE),
    Mutant("what is summed in front, for cuDNN", PRODUCTS, "jnp.transpose(a, (*kept, *axes))",
           "jnp.transpose(a, (*axes, *kept))", (f"{TESTS}test_layouts_for_cudnn",)),
    Mutant("a scale of zero for what is zero", PRODUCTS,
           "scale = jnp.where(scale < float(jnp.finfo(jnp.float32).tiny), 1, scale)", "pass", (f"{TESTS}test_zeros",)),
    Mutant("an infinity that has a scale", PRODUCTS,
           "scale = jnp.where(scale < float(jnp.finfo(jnp.float32).tiny), 1, scale)",
           "scale = jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1)",
           (f"{TESTS}test_what_is_no_number_is_seen",)),
    Mutant("derivatives of what was rounded", PRODUCTS, "return Eight(_in_dtype(dtype, values), scale, axes)",
           "return Eight(values.astype(dtype), scale, axes)", (f"{TESTS}test_errors",)),
    Mutant("an offset's gradient by another recipe where it is wanted alone", t.XLA_LINEAR,
           'norm.has_groups or junction.eight_bits != ""', "norm.has_groups", (f"{TESTS}test_transformations",)),
    Mutant("the largest |z| of a given scale not told", DERIVATIVES,
           "amax = outcome.y_max if operands.y_scale is not None else None", "amax = None", DELAYED),
    Mutant("one scale for all examples of Linears", t.VMAPS, 'junction.eight_bits == "one" or ', "", VMAP),
    Mutant("a product in eight bits that what stands in for JAX's sees", PRODUCTS, "lax.dot(", "lax.dot_general(",
           ("tests/modules/test_qwix.py::test_no_product_of_an_operator_is_seen[gradients-one scale]",)),
]  # fmt: skip
