"""Ways to break which norms `jln.fuse` takes, and with what."""

from targets import Mutant

FILES = "rewriting", "graph", "readers", "junctions", "linears", "norms", "bodies"
REWRITING, GRAPH, READERS, JUNCTIONS, LINEARS, NORMS, BODIES = (f"jln/_fuse/{name}.py" for name in FILES)
DERIVATIVES = "jln/_core/derivatives.py"
EIGHT_BITS, BETWEEN, WAYS = (f"tests/fuse/test_{name}.py::" for name in ("in_eight_bits", "between", "ways"))
FOUND = f"{BETWEEN}test_the_norm_and_its_linears_are_found_behind"
COPIES = f"{BETWEEN}test_what_products_pull_back_is_added_up_in_the_backward_kernel"
SHARED = "tests/fuse/test_transformations.py::test_layers_that_share_a_function_are_rewritten_once_for_each_policy"
NAMED = f"{BETWEEN}test_a_checkpoint_keeps_what_has_a_name_behind_a_product"


def reader(name: str) -> tuple[str, ...]:
    return (f"{EIGHT_BITS}test_who_reads_a_norm_decides[{name}]",)


def way(name: str) -> tuple[str, ...]:
    return (f"{WAYS}test_it_is_found_and_nothing_changes[{name}]",)


FUSED = [
    Mutant("a result that is read, too, forgotten", READERS, "if graph.is_result(v):", "if False:",
           reader("a result, too")),
    Mutant("a cast to eight bits taken for a copy", REWRITING,
           "return shapes(node) and not _is_quantised(node.output)", "return shapes(node)", reader("a cast")),
    Mutant("functions that quantise taken for products", REWRITING, " or _quantises(node))", ")",
           (f"{EIGHT_BITS}test_an_rms_norm_is_left[alone-current scales]",)),
    Mutant("functions with a derivative of their own taken for quantisers", REWRITING,
           "return any(map(_is_quantised, [*body.inputs", "return True or any(map(_is_quantised, [*body.inputs",
           reader("an activation of one's own")),
    Mutant("eight bits that a function is given", REWRITING, "[*body.inputs, *(v for n", "[*(v for n",
           reader("an operand for backward alone")),
    Mutant("a gate of each row taken", JUNCTIONS, " and groups_of(*sizes) is not None", "",
           ("tests/fuse/test_remarks.py::test_what_no_kernel_takes_is_left_and_says_so[a gate of each row]",)),
    Mutant("layers that share a checkpoint rewritten each", BODIES, "if key not in shared:", "if True:", (SHARED,)),
    Mutant("checkpoints' policies not told apart", BODIES, "id(policy), prevent_cse", "prevent_cse", (SHARED,)),
    Mutant("eight bits that are no floats", REWRITING, '"int8", ', "", reader("integers")),
    Mutant("a LayerNorm that no product reads left", REWRITING,
           "if norm.centres or norm.z is not None or is_in_front:", "if norm.z is not None or is_in_front:",
           (f"{EIGHT_BITS}test_a_layer_norm_is_taken[alone-Flax]",)),
    Mutant("a sum behind that a product reads in eight bits taken", REWRITING,
           "addition is not None and not _is_read_in_eight_bits(self.graph, addition.y)", "addition is not None",
           reader("a sum behind")),
    Mutant("scaled values not followed to eight bits", REWRITING, 'in ("mul", "div", ', 'in ("div", ',
           (f"{EIGHT_BITS}test_a_checkpoint_that_keeps_products[Flax]",)),
    Mutant("the first norm of a pair that is left not listed", REWRITING,
           "if j.in_front is not None and whys[y] is None}", "if j.in_front is not None}",
           (f"{EIGHT_BITS}test_both_norms_of_a_pair_that_a_checkpoint_leaves_are_listed",)),
    Mutant("norms in front of eight bits taken where a checkpoint keeps products", REWRITING,
           "if self.keeps_products and _is_read_in_eight_bits(", "if False and _is_read_in_eight_bits(",
           (f"{EIGHT_BITS}test_a_checkpoint_that_keeps_products[Flax]",)),
    Mutant("norms in front of eight bits left where a checkpoint keeps nothing", REWRITING,
           "if self.keeps_products and _is_read_in_eight_bits(",
           "if options.is_checkpointed and _is_read_in_eight_bits(",
           (f"{EIGHT_BITS}test_a_layer_norm_is_taken[in a checkpoint-Flax]",)),
    Mutant("a product beside eight bits in a checkpoint that keeps products", REWRITING,
           "return quantised and not _is_read_by_a_product(graph, y)", "return quantised",
           (f"{EIGHT_BITS}test_a_layer_norm_in_such_a_checkpoint_that_a_product_reads_too_is_taken",)),
    Mutant("casts out of eight bits merged", GRAPH, " in MERGED and not is_of_eight", " in MERGED",
           (f"{EIGHT_BITS}test_cotangents_in_eight_bits_are_not_added_up_first",)),
    Mutant("a scale by einsum with its axes in another order", GRAPH, "sorted(zip(axes, batch[small], strict=True))]",
           "zip(axes, batch[small], strict=True)]", way("a scale whose axes are turned")),
    Mutant("products without a sum left products", GRAPH, "if contracted or small is None", "if True",
           (f"{WAYS}test_a_scale_by_a_product_without_a_sum_is_the_operators[MaxText]",)),
    Mutant("what looks like a multiplication multiplied in steps", GRAPH,
           "self.replace(results, operands, lambda *arrays", "(lambda *_: 0)(results, operands, lambda *arrays",
           (f"{WAYS}test_a_product_without_a_sum_stays_one",)),
    Mutant("no square by an exponent", NORMS, "constants.number(node.inputs[1]) == 2", "False",
           way("keras_hub's Llama")),
    Mutant("multiples of norms alone", NORMS, "if any(c.factor == 1 for c in certificates) else ()", "",
           ("tests/fuse/test_lookalikes.py::"
            "test_nothing_changes_and_no_more_is_found_than_is_there[a row of length 1]",)),
    Mutant("a factor forgotten", NORMS, "p._replace(factor=c.factor)", "p", (f"{FOUND}[a factor-norms]",)),
    Mutant("a norm in front of a factor made twice", NORMS, "(z is not None or c.factor != 1) and",
           "z is not None and", (f"{BETWEEN}test_a_norm_that_is_read_without_its_factor_is_made_once",)),
    Mutant("a constraint between a norm and its Linears lost", "jln/_fuse/calls.py",
           "constraint=constraint if is_free else None", "constraint=None",
           (f"{BETWEEN}test_a_constraint_in_front_of_linears_is_one_of_what_the_norm_reads",)),
    Mutant("the precision of products lost", LINEARS, "kernel, int(its[0]), bias, not is_first, precision)",
           "kernel, int(its[0]), bias, not is_first, None)",
           (f"{BETWEEN}test_linears_have_the_precision_of_the_products[highest]",)),
    Mutant("a copy for each reader, however many", REWRITING, "[: min(len(found), len(DY)) - 1]", "",
           (f"{COPIES}[rms_norm-5-0]",)),
    Mutant("no copy for a product", REWRITING, "[: min(len(found), len(DY)) - 1]", "[:0]",
           (f"{COPIES}[rms_norm-2-0]",)),
    Mutant("copies that each have a constraint over devices", REWRITING, " if not any(map(spreads, r.between)))", ")",
           ("tests/devices/test_communication.py::test_a_result_that_is_split_is_gathered_once_by_a_fused_program",)),
    Mutant("copies kept by themselves", DERIVATIVES, "{id(a): a for a in given}", "dict(enumerate(given))",
           (f"{BETWEEN}test_copies_are_kept_once",)),
    Mutant("names behind what backward reads", LINEARS,
           "if not (is_scaled or hands_on(node) or node.operation in _LINEAR):", "if False:",
           (f"{NAMED}[behind what backward reads again]",)),
    Mutant("any name taken for one that is kept", LINEARS, ' and keeps(policy, node.equation):', ":",
           (f"{NAMED}[of others]",)),
    Mutant("a name in front of an operator passed by", JUNCTIONS, "if widens(v) or copies(v.maker):",
           "if widens(v) or hands_on(v.maker):", (f"{BETWEEN}test_a_name_in_front_of_an_operator_stays",)),
]  # fmt: skip
