"""The comparison of two commits' kernels sees what differs, and no names."""

import dataclasses
import pickle

import pytest
import same_kernels
from same_kernels import Case, compared, without_names

pytest.importorskip("triton")

CASE = Case("add_rms_norm", (515, 1000), ("bfloat16", "bfloat16", "bfloat16"), "h200")


def described(epsilon=None):
    """Return the launches of CASE by PTX and by IR, with another epsilon in all of them. The worker runs this."""
    made = same_kernels.launches(CASE)
    if epsilon is not None:
        made = [dataclasses.replace(launch, constants=launch.constants | {"EPSILON": epsilon}) for launch in made[:1]]
        made += same_kernels.launches(CASE)[1:]
    same_kernels.launches, before = lambda case: made, same_kernels.launches
    try:
        return {by_ptx: same_kernels.described(CASE, by_ptx)[1] for by_ptx in (False, True)}
    finally:
        same_kernels.launches = before
        same_kernels._known.clear()


def test_another_constant_is_seen(worker):
    old, again, new = (worker.submit(described, epsilon).result() for epsilon in (None, None, 0.5))
    for by_ptx in (False, True):
        assert compared({CASE: old[by_ptx]}, {CASE: again[by_ptx]}) == []
        (difference,) = compared({CASE: old[by_ptx]}, {CASE: new[by_ptx]})
        assert "forward_kernel" in difference and ("PTX" if by_ptx else "IR") in difference


def test_another_grid_and_another_launch_are_seen(worker):
    old = worker.submit(described).result()[False]
    shape = old[0]["shape"]
    grown = [old[0] | {"shape": shape | {"grid": shape["grid"] + 1}}, *old[1:]]
    assert "grid" in "".join(compared({CASE: old}, {CASE: grown}))
    assert len(compared({CASE: old}, {CASE: old[1:]})) == 1
    assert pickle.loads(old[0]["made"]) is None


def test_names_labels_and_places_are_left_out():
    one = ".loc 1 2 3\n$L__BB0_1:\nld.param.b64 %rd1, [forward_kernel_param_0];\nbra $L__BB0_1; // 7\n#loc1 = loc(3:4)"
    other = "$L__BB7_2:\nld.param.b64 %rd9, [norm_kernel_param_0];\nbra $L__BB7_2; // line 9"
    assert without_names(one) == without_names(other)
    assert without_names("tt.load %a.x, %r.y") == without_names("tt.load %x_ptr, %y_ptr")
    assert without_names("add.f32 %f1, %f2, %f3;") != without_names("add.f32 %f1, %f3, %f3;")
