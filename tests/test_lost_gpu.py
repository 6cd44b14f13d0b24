"""The hook that ends a process whose GPU context a test has broken."""

import pytest

import lost_gpu

pytest.importorskip("xdist")
pytest_plugins = ["pytester"]


@pytest.mark.parametrize("said", ["CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access", "INTERNAL: not of a GPU"])
def test_the_process_of_a_broken_context_ends(pytester, said):
    """One test is told to have crashed, the others of its process pass in the next; another error ends no process."""
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {str(lost_gpu.__file__).rpartition('/')[0]!r})\n"
        "from lost_gpu import pytest_runtest_makereport"
    )
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
