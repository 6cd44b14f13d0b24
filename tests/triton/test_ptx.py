"""Rung 3: what the compiler makes of the kernels' loads, copies, products and fences, read from PTX.

Compiling needs a process without TRITON_INTERPRET, so each case runs in a worker process. Nothing here needs a GPU.
"""

from __future__ import annotations

import re

import pytest

import compiler
from jln._junction.linears import tiles as linear_tiles
from jln._triton.chip import CHIPS as ALL_CHIPS
from launches import CHIPS, DTYPES, FUSED, LINEAR_DTYPES, SWITCHES, launches, linear_launches

pytest.importorskip("triton")

# Rows of heads: whole ones, several a tile or one, and chunks.
WIDE = (64, 128, 1000, 20000)


def load_widths(dtype, widths):
    """Return for each launch its kernel and the widths in bytes of all loads from global memory in its PTX.

    The worker runs this.
    """
    made = []
    for h in widths:
        for launch in launches(h, DTYPES[dtype], "h200", SWITCHES["nothing"] | {"heads": 12}):
            ptx = compiler.compile_launch(launch).assembly
            loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
            widths = {int(vector or 1) * int(bits) // 8 for vector, bits in loads}
            widths |= {int(n, 16) for n in re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], 0x(\w+)", ptx)}
            made.append((f"{launch.kernel.fn.__name__} {dtype} H={h}", widths))
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_heads_are_loaded_16_bytes_at_a_time(worker, dtype):
    """Rows of heads are loaded 16 bytes at a time.

    Backward kernels may load statistics, one number a row, by 4 bytes.
    """
    made = worker.submit(load_widths, dtype, WIDE).result()
    assert len(made) >= 2 * len(WIDE)
    wrong = [m for m in made if m[1] - {4} != {16} or (4 in m[1] and m[0].startswith("forward"))]
    assert wrong == []


def copies_of_a_fused_forward(shape, dtype):
    """Return the widths in bytes of a fused forward kernel's copies from global to shared memory.

    The worker runs this.
    """
    m, h, n = shape
    launch = linear_launches(m, h, n, LINEAR_DTYPES[dtype], "h200", SWITCHES["nothing"])[0]
    function = launch.kernel.fn
    assert (function.__module__, function.__name__) == ("jln._junction.kernels.with_linear", "forward_kernel")
    copies = re.findall(
        r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], 0x(\w+)", compiler.compile_launch(launch).assembly
    )
    return {int(n, 16) for n in copies}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_fused_forward_copies_16_bytes_at_a_time(worker, dtype):
    assert worker.submit(copies_of_a_fused_forward, (100_000, 512, 64), dtype).result() == {16}


def contractible(chip):
    """Return the products and sums without `.rn`, which ptxas may fuse, of each kernel of a norm and a fused Linear.

    The worker runs this.
    """
    made = launches(65, DTYPES["float32"], chip, SWITCHES["everything"])
    made += linear_launches(200, 64, 16, LINEAR_DTYPES["bfloat16"], chip, SWITCHES["everything"])
    found = {}
    for launch in made:
        ptx = compiler.compile_launch(launch).assembly
        assert "add.rn.f32" in ptx or "fma.rn.f32" in ptx
        found[launch.kernel.fn.__module__, launch.kernel.fn.__name__] = re.findall(r"\b(?:mul|add|sub)\.f\d\d", ptx)
    return found


@pytest.mark.parametrize("chip", CHIPS)
def test_no_product_is_contracted_with_the_sum_it_goes_into(worker, chip):
    """No product in a kernel may be fused with the sum that it goes into.

    Two threads that each add their own x * x to the other's would round only the other's, and store different sums.
    """
    found = worker.submit(contractible, chip).result()
    assert len(found) == 7
    assert [kernel for kernel, some in found.items() if some] == []


def unfenced_products(ptx):
    """Return the products in PTX that a thread may reach without a proxy fence after it stored to shared memory.

    wgmma and tcgen05.mma read shared memory through another proxy than stores, and only such a fence orders the two.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    found, seen, ahead = set(), set(), [(0, False)]
    while ahead:
        at, stored = ahead.pop()
        while at < len(lines) and (at, stored) not in seen:
            seen.add((at, stored))
            line = lines[at]
            if re.search(r"\bst(matrix|\.(volatile\.)?shared)", line):
                stored = True
            elif "fence.proxy.async" in line:
                stored = False
            elif stored and re.search(r"wgmma\.mma_async|tcgen05\.(mma|cp)\b", line):
                found.add(line)
            if branch := re.search(r"\bbra(?:\.\w+)?\s+(\$\w+)", line):
                ahead.append((labels[branch[1]], stored))
            if re.match(r"(ret|bra)\b", line):
                break
            at += 1
    return sorted(found)


def fences_of_fused_kernels(chip, dtype, sizes):
    """Return (kernel, number of products, products without a fence) of each fused kernel.

    The worker runs this.
    """
    made = []
    for m, h, n in sizes:
        for launch in linear_launches(m, h, n, LINEAR_DTYPES[dtype], chip, SWITCHES["everything"]):
            ptx = compiler.compile_launch(launch).assembly
            products = len(re.findall(r"wgmma\.mma_async|tcgen05\.mma\b", ptx))
            made.append((f"{launch.kernel.fn.__name__} M={m} H={h} N={n}", products, unfenced_products(ptx)))
    return made


@pytest.mark.parametrize(
    ("chip", "dtype"),
    [("h200", "bfloat16"), ("b200", "bfloat16"), pytest.param("h200", "float32", marks=pytest.mark.heavy)],
)
def test_products_wait_for_what_is_stored_to_shared_memory(worker, chip, dtype):
    """A proxy fence stands between a fused kernel's stores to shared memory and the products that read it.

    Without it results are wrong now and then. Triton before 3.7.1 leaves the fences out, so no kernel is fused there.
    """
    if (why := linear_tiles.missing_fence(ALL_CHIPS[chip])) is not None:
        for choose in (linear_tiles.forward_tile, linear_tiles.backward_plan):
            assert all(choose(m, h, n, dtype, ALL_CHIPS[chip]) is None for m, h, n in FUSED), why
        return
    made = worker.submit(fences_of_fused_kernels, chip, dtype, [(100_000, 512, 64)]).result()
    assert sum(products > 0 for _, products, _ in made) == 3
    assert [(what, missing) for what, _, missing in made if missing] == []


def test_a_fence_that_is_missing_is_seen():
    loop = "$L__1:\n{wait}\nwgmma.mma_async.sync x;\nst.shared.b32 [%r1], %r2;\n@%p1 bra $L__1;\nret;"
    assert unfenced_products(loop.format(wait="bar.sync 0;")) == ["wgmma.mma_async.sync x;"]
    assert unfenced_products(loop.format(wait="fence.proxy.async.shared::cta;")) == []
