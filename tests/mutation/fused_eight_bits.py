"""Ways to break how fuse finds eight bits."""

from targets import Mutant

FOUND, PROBES, READ = "jln/_fuse/quantisations.py", "jln/_fuse/probes.py", "jln/_fuse/eight_bits.py"
RULES = "jln/_fuse/readers.py"
TESTS, FUNCTIONS = "tests/fuse/test_quantisations.py::", "tests/fuse/test_eight_bit_functions.py::"
SEVERAL = "tests/fuse/test_several_eight_bits.py::"
OF_RULES = "tests/fuse/test_eight_bit_rules.py::"


def left(name: str) -> tuple[str, ...]:
    return (f"{TESTS}test_what_is_left_as_it_is[{name}]",)


def product(name: str) -> tuple[str, ...]:
    return (f"{FUNCTIONS}test_products_that_are_differentiated[{name}]",)


def several(name: str) -> tuple[str, ...]:
    return (f"{SEVERAL}test_one_kernel_makes_all[{name}]",)


def way(name: str) -> tuple[str, ...]:
    return (f"{TESTS}test_eight_bits_of_the_program[{name}]",)


FUSED_EIGHT_BITS = [
    Mutant(
        "eight bits of other numbers found",
        PROBES,
        "return bool(np.all((got == wanted) | np.isinf(wanted) | (np.isnan(got) & np.isnan(wanted))))",
        "return True",
        left("an offset"),
    ),
    Mutant(
        "elements out of their order",
        FOUND,
        "return moved == sorted(moved)",
        "return True",
        left("blocks of rows"),
    ),
    Mutant(
        "the largest of no magnitudes",
        FOUND,
        "return ONE if output.size == 1 and source in self._magnitudes else None",
        "return ONE if output.size == 1 else None",
        left("the largest of no magnitudes"),
    ),
    Mutant(
        "a factor that divides",
        RULES,
        "return 1 / scale if is_factor else scale",
        "return scale",
        way("one scale that is a factor"),
    ),
    Mutant(
        "rows that are not finite taken for others",
        PROBES,
        "unbounded[1], unbounded[2, 5], unbounded[3, 7], unbounded[4] = np.nan, np.inf, -np.inf, -0.0",
        "pass",
        left("guarded against NaN"),
    ),
    Mutant(
        "sizes at which a number counts forgotten",
        PROBES,
        "for size in (3e-33, 2e34, *sizes)]",
        "for size in ()]",
        left("guarded against small numbers"),
    ),
    Mutant(
        "a maximum beside blocks",
        FOUND,
        "maxima = () if scale is None else tuple(",
        "maxima = tuple(",
        several("the maximum beside blocks"),
    ),
    Mutant(
        "a rule that quantises in another way",
        RULES,
        "if isinstance(found, Quantisation) and takes(graph, found):",
        "if isinstance(found, Quantisation):",
        (f"{OF_RULES}test_a_rule_that_quantises_in_another_way[another factor]",),
    ),
    Mutant(
        "the function's results for those of its rule",
        READ,
        "y = again(*arguments) if any(r.reads_copy_at_once for r in readers) else None",
        "y = None",
        (f"{OF_RULES}test_a_rule_that_quantises_in_another_way[no eight bits]",),
    ),
    Mutant(
        "the program's own equations without their derivative",
        READ,
        "for output in (v for v in own.made if read[v]):",
        "for output in (v for v in own.values if read[v]):",
        way("a penalty on the maximum"),
    ),
    Mutant(
        "the rule of what is not differentiated",
        READ,
        "None if isinstance(d, SymbolicZero) or is_float0(d) else d for d in of]",
        "None if is_float0(d) else jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d for d in of]",
        (f"{OF_RULES}test_rules_of_what_is_not_differentiated[one of two stopped]",),
    ),
    Mutant(
        "functions that ask for symbolic zeros",
        READ,
        'if is_function and not node.params["symbolic_zeros"]:',
        "if is_function:",
        (f"{OF_RULES}test_a_function_that_asks_for_symbolic_zeros_is_left_as_it_is",),
    ),
    Mutant(
        "a function that its rule calls not looked into",
        RULES,
        "    graph = Graph(program, with_functions=True)",
        "    graph = Graph(program)",
        (f"{OF_RULES}test_a_rule_that_calls_the_function_reads_the_eight_bits_of_the_kernel[delayed]",),
    ),
    Mutant(
        "a number that elements are compared with",
        FOUND,
        "return is_compared or (",
        "return (",
        left("a number of its own"),
    ),
    Mutant(
        "casts out of eight bits merged",
        "jln/_fuse/graph.py",
        " in MERGED and not is_of_eight",
        " in MERGED",
        (f"{FUNCTIONS}test_cotangents_in_eight_bits_are_not_added_up_first",),
    ),
    Mutant(
        "scales that wait for each other",
        "jln/_fuse/rewriting.py",
        "outputs = [norm.x, norm.y, *(v for r in found.readers for v in r.outputs)]",
        "outputs = []",
        (f"{FUNCTIONS}test_scales_of_two_norms_that_wait_for_each_other",),
    ),
    Mutant(
        "what is read in other bits quantised",
        READ,
        "        if graph.is_result(value):\n            return True\n",
        "",
        several("a result, too"),
    ),
    Mutant(
        "a function that reads the norm itself",
        READ,
        "[r for r in functions if not r.reads_more and not",
        "[r for r in functions if not",
        (f"{FUNCTIONS}test_a_function_that_reads_more",),
    ),
    Mutant(
        "scales of two products taken for one",
        READ,
        "ways = [0 if r.quantisation is None else keys.index(r.scale().key) for r in group]",
        "ways = [0 for r in group]",
        several("three scales of Flax"),
    ),
    Mutant(
        "more ways than the kernel has",
        READ,
        "if len(scales) + is_read > len(SCALE_OF) or",
        "if len(scales) > len(SCALE_OF) or",
        (f"{SEVERAL}test_what_is_left_as_it_is[three scales and the result]",),
    ),
    Mutant(
        "blocks in two dtypes as one",
        READ,
        "or sum(not scale.is_given for scale in scales) > 1:",
        "or False:",
        (f"{SEVERAL}test_what_is_left_as_it_is[blocks in two dtypes]",),
    ),
    Mutant(
        "a given scale in the place of blocks",
        READ,
        "sorted(by_key.values(), key=lambda scale: scale.is_given)",
        "[*by_key.values()]",
        several("blocks, and a scale"),
    ),
    Mutant(
        "the norm made again of no mean",
        READ,
        "mean = None if made.mean is None else made.mean.reshape(*x.shape[:-1], 1)",
        "mean = None",
        (f"{SEVERAL}test_the_norm_is_made_again_of_the_statistics_that_were_kept[layer]",),
    ),
    Mutant(
        "a result beside eight bits where Linears keep what the norm read",
        "jln/_fuse/rewriting.py",
        "may_be_read = not options.linears and not options.is_checkpointed",
        "may_be_read = True",
        (f"{SEVERAL}test_what_is_left_as_it_is[with Linears, which keep what the norm read]",),
    ),
    Mutant(
        "a product that two norms quantise",
        "jln/_fuse/rewriting.py",
        " and not taken & functions:",
        ":",
        product("two_norms_in_one_product"),
    ),
    Mutant(
        "a scale of what is normalised",
        READ,
        "if any(graph.depends(v, [norm.x, y, *made]) for v in result.inputs):",
        "if False:",
        left("a scale of x"),
    ),
    Mutant(
        "a product that waits for another",
        READ,
        "if before and not any(graph.depends(v, before) for v in reader.others):",
        "if before:",
        product("products_one_behind_the_other"),
    ),
    Mutant(
        "an effect that is forgotten",
        READ,
        "if reader is not None or node.equation.effects:",
        "if reader is not None:",
        (f"{FUNCTIONS}test_effects_stay",),
    ),
    Mutant(
        "one product's cotangent alone",
        READ,
        "return functools.reduce(jnp.add, given,",
        "return functools.reduce(lambda a, _: a, given,",
        product("jax_blocks_of_two_products"),
    ),
    Mutant(
        "the copy's cotangent without the norm",
        RULES,
        "return any(v in read for v, of in zip(",
        "return any(False for v, of in zip(",
        product("a_cotangent_that_reads_the_norm"),
    ),
    Mutant(
        "the norm kept, and not made again",
        RULES,
        "made = [(v, of) for v, of in of_rule if forward.inputs[self.place] in forward.needed([v])[1]]",
        "made = []",
        product("jax_blocks"),
    ),
]
