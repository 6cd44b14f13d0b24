"""Ways to break what fuse does with norms in front of products in eight bits."""

from targets import Mutant

REWRITING, GRAPH = "jln/_fuse/rewriting.py", "jln/_fuse/graph.py"
TESTS = "tests/fuse/test_in_eight_bits.py::"


def quantiser(name: str) -> tuple[str, ...]:
    return (f"{TESTS}test_an_rms_norm_that_only_quantisers_read_is_left[{name}]",)


def other(name: str) -> tuple[str, ...]:
    return (f"{TESTS}test_a_norm_that_something_else_reads_is_taken[{name}]",)


FUSED_EIGHT_BITS = [
    Mutant(
        "a norm that is a result, too, left for its eight bits",
        REWRITING,
        "    if graph.is_result(y):\n        return True\n",
        "",
        other("a result, too"),
    ),
    Mutant(
        "a function's result that is its operand forgotten",
        REWRITING,
        "    if graph.is_result(y):\n        return True\n",
        "    if graph.is_result(y):\n        return y.maker is not None\n",
        other("an operand that is handed on"),
    ),
    Mutant(
        "a cast to eight bits taken for a copy",
        REWRITING,
        "if not _is_quantised(node.output) and _is_read_by_a_product(graph, node.output):",
        "if _is_read_by_a_product(graph, node.output):",
        quantiser("a cast"),
    ),
    Mutant(
        "a copy that is a result forgotten",
        REWRITING,
        "if not _is_quantised(node.output) and _is_read_by_a_product(graph, node.output):",
        "if False:",
        other("a result in another dtype, too"),
    ),
    Mutant(
        "functions that quantise taken for products",
        REWRITING,
        " and not _quantises(node, y):",
        ":",
        (f"{TESTS}test_an_rms_norm_is_left[alone-current scales]",),
    ),
    Mutant(
        "functions with a derivative of their own taken for quantisers",
        REWRITING,
        "return any(map(_is_quantised, values)) and not any(",
        "return not any(",
        other("an activation of one's own"),
    ),
    Mutant(
        "functions that quantise a kernel taken for quantisers",
        REWRITING,
        " and not any(_is_read_by_a_product(body, a) for a in operands)",
        "",
        other("a kernel in eight bits"),
    ),
    Mutant(
        "one operand of two in eight bits",
        REWRITING,
        " and not any(_is_read_by_a_product(body, a) for a in operands)",
        " and not all(_is_read_by_a_product(body, a) for a in operands)",
        other("one operand of two"),
    ),
    Mutant(
        "eight bits that a function is given",
        REWRITING,
        "values = [*body.inputs, *(",
        "values = [*(",
        quantiser("an operand for backward alone"),
    ),
    Mutant(
        "eight bits that are no floats",
        REWRITING,
        '"int8", ',
        "",
        quantiser("integers"),
    ),
    Mutant(
        "a LayerNorm that no product reads left",
        REWRITING,
        "if norm.centres or norm.z is not None or is_in_front:",
        "if norm.z is not None or is_in_front:",
        (f"{TESTS}test_a_layer_norm_is_taken[alone-Flax]",),
    ),
    Mutant(
        "no reason for a LayerNorm that no product reads",
        REWRITING,
        "            why = _IS_BETTER_ALL_THE_SAME\n",
        "            pass\n",
        (f"{TESTS}test_a_layer_norm_is_taken[alone-Flax]",),
    ),
    Mutant(
        "a reason for a LayerNorm that a product reads",
        REWRITING,
        "if norm.centres and _is_read_in_eight_bits(self.graph, norm.y):",
        "if norm.centres:",
        (f"{TESTS}test_a_layer_norm_that_a_product_reads_too_has_no_reason",),
    ),
    Mutant(
        "a LayerNorm's reason for an RMSNorm",
        REWRITING,
        "if norm.centres and _is_read_in_eight_bits(",
        "if _is_read_in_eight_bits(",
        (f"{TESTS}test_what_has_an_operator_beyond_the_norm_is_taken[rms_norm_gated]",),
    ),
    Mutant(
        "a sum behind that a product reads in eight bits taken",
        REWRITING,
        "addition is not None and not _is_read_in_eight_bits(self.graph, addition.y)",
        "addition is not None",
        (f"{TESTS}test_a_sum_behind_that_a_product_reads_in_eight_bits_is_left",),
    ),
    Mutant(
        "scaled values not followed to eight bits",
        REWRITING,
        '_SCALED = ("mul", ',
        "_SCALED = (",
        (f"{TESTS}test_a_checkpoint_that_keeps_products[Flax]",),
    ),
    Mutant(
        "the first norm of a pair that is left not listed",
        REWRITING,
        "if j.in_front is not None and whys[y] is None}",
        "if j.in_front is not None}",
        (f"{TESTS}test_both_norms_of_a_pair_that_a_checkpoint_leaves_are_listed",),
    ),
    Mutant(
        "norms in front of eight bits taken where a checkpoint keeps products",
        REWRITING,
        "if options.keeps_products and _is_read_in_eight_bits(",
        "if False and _is_read_in_eight_bits(",
        (f"{TESTS}test_a_checkpoint_that_keeps_products[Flax]",),
    ),
    Mutant(
        "norms in front of eight bits left where a checkpoint keeps nothing",
        REWRITING,
        "if options.keeps_products and _is_read_in_eight_bits(",
        "if options.is_checkpointed and _is_read_in_eight_bits(",
        (f"{TESTS}test_a_layer_norm_is_taken[in a checkpoint-Flax]",),
    ),
    Mutant(
        "a product beside eight bits in a checkpoint that keeps products",
        REWRITING,
        "for node in v.readers) and not _is_read_by_a_product(graph, y)",
        "for node in v.readers)",
        (f"{TESTS}test_a_layer_norm_in_such_a_checkpoint_that_a_product_reads_too_is_taken",),
    ),
    Mutant(
        "casts out of eight bits merged",
        GRAPH,
        " in MERGED and not is_of_eight",
        " in MERGED",
        (f"{TESTS}test_cotangents_in_eight_bits_are_not_added_up_first",),
    ),
]
