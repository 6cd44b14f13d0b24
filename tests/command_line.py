"""`python -m jln`, in this process or in one of its own."""

import os
import subprocess
import sys

from jln._cli import app


def run(capsys, *arguments):
    """-> (exit status, stdout, stderr)"""
    status = app.run(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def process(*arguments, before="", **environment):
    """The same in a process of its own: `python -m jln`, after some code."""
    code = (
        f"import sys, runpy\n{before}\nsys.argv = ['jln', *{arguments!r}]\nrunpy.run_module('jln', run_name='__main__')"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
