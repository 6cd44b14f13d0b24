"""Runs of `python -m jln`, in this process or in one of its own."""

import os
import subprocess
import sys

from jln._tools import app


def run(capsys, *arguments):
    """Run the command line in this process and return its exit status, stdout and stderr."""
    status = app.run(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def process(*arguments, before="", **environment):
    """Run some code and then `python -m jln` in a process of its own."""
    code = (
        f"import sys, runpy\n{before}\nsys.argv = ['jln', *{arguments!r}]\nrunpy.run_module('jln', run_name='__main__')"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
