"""The comparison of two commits' kernels sees what differs, and no names."""

import dataclasses

import pytest
import same_kernels
from same_kernels import compared, without_names

from launches import Case

pytest.importorskip("triton")

CASE = Case("add_rms_norm", (515, 1000), ("bfloat16", "bfloat16", "bfloat16"), "h200")


def test_what_differs_is_seen(worker):
    for by_ptx, what in ((False, "IR"), (True, "PTX")):
        same, other = CASE, dataclasses.replace(CASE, options=(("epsilon", 0.5),))
        old, again, new = (worker.submit(same_kernels.described, c, by_ptx).result() for c in (CASE, same, other))
        assert compared({CASE: old}, {CASE: again}) == []
        (difference,) = compared({CASE: old}, {CASE: new})
        assert "forward_kernel" in difference and what in difference
    grown = [old[0] | {"shape": old[0]["shape"] | {"grid": old[0]["shape"]["grid"] + 1}}, *old[1:]]
    assert "grid" in "".join(compared({CASE: old}, {CASE: grown}))
    assert len(compared({CASE: old}, {CASE: old[1:]})) == 1


def test_names_labels_and_places_are_left_out():
    one = ".loc 1 2 3\n$L__BB0_1:\nld.param.b64 %rd1, [forward_kernel_param_0];\nbra $L__BB0_1; // 7\n#loc1 = loc(3:4)"
    other = "$L__BB7_2:\nld.param.b64 %rd9, [norm_kernel_param_0];\nbra $L__BB7_2; // line 9"
    assert without_names(one) == without_names(other)
    assert without_names("tt.load %a.x, %r.y") == without_names("tt.load %x_ptr, %y_ptr")
    assert without_names("add.f32 %f1, %f2, %f3;") != without_names("add.f32 %f1, %f3, %f3;")
