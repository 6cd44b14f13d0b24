"""Ways to break what the modules and conversions make of a model's layers."""

from targets import (
    CONTEXTS,
    CONVERSION_OF_NNX,
    CONVERSIONS,
    EXPLAIN,
    FUSE,
    NORMS_OF_MODULES,
    ORIGINS,
    READING,
    RECIPES,
    Mutant,
)

MAPPED = ("tests/modules/test_products.py::test_a_result_is_the_result_of_what_was_read_however_either_is_mapped[300]",)
EVERY_LINEAR = (f"{FUSE}test_every_linear_behind_a_norm_is_found_and_all_numbers_are_the_frameworks[nnx]",)
OF_RECIPES = "tests/modules/test_recipes.py::"
OF_READING = "tests/test_reading_linear.py::"

MODULES = [
    Mutant(
        "a norm of mapped parameters known behind the vmap", ORIGINS,
        "if any(getattr(a, \"_trace\", None) is z._trace for a in parameters):", "if False:",
        MAPPED,
    ),
    Mutant(
        "a norm known in a vmap that is the Linear's alone", ORIGINS,
        "if len(inside) > known.mapped:", "if False:",
        MAPPED,
    ),
    Mutant(
        "vmap over another axis taken for the first", ORIGINS,
        "getattr(a, \"batch_dim\", None) == 0", "getattr(a, \"batch_dim\", None) is not None",
        MAPPED,
    ),
    Mutant(
        "what was donated read again", ORIGINS,
        "if any(_is_deleted(a) for a in (x, scale, offset)):", "if False:",
        ("tests/modules/test_products.py::test_the_result_of_what_has_been_donated_since_is_a_result_still",),
    ),
    Mutant(
        "a result's axes in the order of the product", NORMS_OF_MODULES,
        "y if linear.result_axes is None else y.transpose(linear.result_axes)", "y",
        EVERY_LINEAR,
    ),
    Mutant(
        "a recipe's zero-centred scale not centred", RECIPES,
        "zero_centered_scale=bool(described.get(\"zero_centered_scale\", False))", "zero_centered_scale=False",
        (f"{OF_RECIPES}test_an_own_norm_and_the_linear_behind_it[nnx]",),
    ),
    Mutant(
        "an heir's recipe behind the framework's call", CONTEXTS,
        "if isinstance(layer, c) and of.defined_in(context, c):\n                return _modules",
        "if isinstance(layer, c) and not isinstance(layer, of.norms) and of.defined_in(context, c):\n"
        "                return _modules",
        (f"{OF_RECIPES}test_a_frameworks_heir_with_a_call_of_its_own_has_its_own_recipe",),
    ),
    Mutant(
        "a module converted before what may be wrong is known", CONVERSION_OF_NNX,
        "swaps = [CLASSES.of(module, recipes, id(module) in wanted) for _, module in modules]",
        "swaps = (CLASSES.of(module, recipes, id(module) in wanted) for _, module in modules)",
        (f"{OF_RECIPES}test_recipes_that_are_wrong",),
    ),
    Mutant(
        "a recipe's dtype ignored", RECIPES,
        "described.get(\"dtype\") or result.dtype", "result.dtype",
        (f"{OF_RECIPES}test_a_dtype_that_the_recipe_names",),
    ),
    Mutant(
        "a converted subclass pickled as the model's class", CONVERSIONS,
        "return _unpickled, (make, (cls, *how), new, args), *state", "return reduced",
        (f"{OF_RECIPES}test_converted_subclasses_and_own_norms_are_pickled[5]",),
    ),
    Mutant(
        "subclasses left as they are", CONVERSIONS,
        "if issubclass(cls, theirs):", "if False:",
        ("tests/modules/test_convert.py::test_nnx_shared_layers_metadata_and_subclasses",),
    ),
    Mutant(
        "what makes z again kept though no kernel's gradient is wanted", READING,
        "needed(operands.made_of, wanted.kernel)", "operands.made_of",
        (f"{OF_READING}test_what_is_kept_is_no_more_than_what_is_read",),
    ),
    Mutant(
        "the bias's tangent lost, of a norm's result", READING,
        "if tangents.bias is not None:", "if False:",
        (f"{OF_READING}test_tangents_of_each_argument",),
    ),
    Mutant(
        "loops and checkpoints not told", EXPLAIN,
        "route._replace(why=route.why + within)", "route",
        ("tests/modules/test_explain.py::test_where_a_layer_is_and_what_is_around_it",),
    ),
]  # fmt: skip
