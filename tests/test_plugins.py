"""Tests of the plugins beside this file: combinations of parameters, broken GPU contexts, memory."""

import itertools
import pathlib

import pytest

from combinations import covering, kind

pytest_plugins = ["pytester"]
PLUGIN = f"import sys\nsys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\npytest_plugins = [{{!r}}]\n".format

VALUES = {"name": ("a", "b", "c", "d"), "dtype": ("x", "y", "z"), "jitted": ("0", "1"), "device": ("0", "1")}
ALL = [dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def pairs(combinations):
    return {pair for values in combinations for pair in itertools.combinations(sorted(values.items()), 2)}


def test_every_pair_of_values_is_in_one():
    chosen = [ALL[i] for i in covering(ALL)]
    assert pairs(chosen) == pairs(ALL)
    assert 12 <= len(chosen) <= 16 < len(ALL) == 48  # 12 are the pairs of the two parameters with the most values


def test_operators_of_one_family_stand_for_each_other_and_each_is_there():
    names = ("layer_norm", "rms_norm", "add_rms_norm", "layer_norm_linear", "rms_norm_linear, few features")
    every = [{"name": name, "jitted": jitted, "rows": rows} for name in names for jitted in "01" for rows in (1, 2, 3)]
    chosen = [every[i] for i in covering(every)]
    assert {values["name"] for values in chosen} == {*names} and len(chosen) == 6
    assert kind("layer_norm_linear, 3 of them") == kind("rms_norm_linear") != kind("rms_norm") == kind("layer_norm")
    for jitted, rows in itertools.product("01", (1, 2, 3)):
        assert any(values["jitted"] == jitted and values["rows"] == rows for values in chosen)


def test_the_others_run_when_asked_for(pytester):
    pytester.makeini("[pytest]\nmarkers = combination")
    pytester.makeconftest("from combinations import pytest_collection_modifyitems")
    pytester.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.parametrize("a", [0, 1])
        @pytest.mark.parametrize("b", [0, 1])
        @pytest.mark.parametrize("c", [0, 1])
        def test_one(a, b, c): pass
        """
    )

    def run(*arguments):
        return pytester.runpytest_inprocess("-n0", "-p", "no:cacheprovider", *arguments)

    run("-m", "not combination").assert_outcomes(passed=4, deselected=4)
    run().assert_outcomes(passed=8)
    run("-m", "not combination", "test_it.py::test_one[1-1-1]").assert_outcomes(passed=1)


@pytest.mark.parametrize("said", ["CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access", "INTERNAL: not of a GPU"])
def test_the_process_of_a_broken_context_ends(pytester, said):
    """One test is told to have crashed, the others of its process pass in the next; another error ends no process."""
    pytester.makeconftest(PLUGIN("lost_gpu"))
    pytester.makepyfile(
        f"""
        import os
        import pytest

        @pytest.mark.parametrize("i", range(6))
        def test(i):
            if i == 2:
                raise RuntimeError({said!r})
            with open("processes", "a") as file:
                file.write(f"{{os.getpid()}} ")
        """
    )
    ran = pytester.runpytest_subprocess("-n1", "-p", "no:cacheprovider")
    ran.assert_outcomes(failed=1, passed=5)
    processes = set((pytester.path / "processes").read_text().split())
    if "CUDA" in said:
        ran.stdout.fnmatch_lines(["*crashed while running*test*2*"])
        assert len(processes) == 2 and f"RuntimeError: {said}" in ran.stderr.str() + ran.stdout.str()
    else:
        assert len(processes) == 1


@pytest.mark.parametrize(("most", "status"), [(100_000, 0), (100, 1)])
def test_the_memory_of_each_process_is_printed_and_bounded(pytester, most, status):
    """A process that holds more than enough has forgotten its programs when the next test begins."""
    pytester.makeconftest(PLUGIN("memory"))
    pytester.makepyfile(
        """
        import jax
        import memory
        import numpy

        memory.ENOUGH = 100
        f = jax.jit(lambda x: x + 1)

        def test_first():
            assert f(numpy.ones(100, "int32")).shape and f._cache_size() == 1

        def test_second():
            assert f._cache_size() == 0
        """
    )
    ran = pytester.runpytest_subprocess("-n1", "-p", "no:cacheprovider", f"--most-memory={most}")
    ran.assert_outcomes(passed=2)
    ran.stdout.re_match_lines([r"The most memory held: gw0 \d+ MB, together \d+ MB"])
    assert ran.ret == status
