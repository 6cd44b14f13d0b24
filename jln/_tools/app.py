"""The table of commands, and how a run of one ends.

Exit status 0: all is well. 1: a finding. 2, with one line: a bad request, or output that cannot be written. 141,
without a word: the reader of the output has gone (`| head -1`), as any program ends then.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

import jax
import typer

from jln._tools import bench, check, doctor, report, tune
from jln._tools.console import UserError, complain, drop

COMMANDS: dict[str, Callable[..., None]] = {
    "check": check.command,
    "doctor": doctor.command,
    "bench": bench.command,
    "report": report.command,
    "tune": tune.command,
}

# All complaints of typer about what was typed; which package it comes from depends on typer's version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def application() -> typer.Typer:
    about = "LayerNorm for JAX: is it right, what will it do here, and how fast is it?"
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=about)
    app.callback()(lambda: None)  # keeps the name of a single command
    for name, command in COMMANDS.items():
        app.command(name)(command)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    try:
        status = _run(arguments)
        if sys.stdout is not None:  # as of `>&-`
            sys.stdout.flush()  # here, where a failure can be told, and not when Python ends
    except (BrokenPipeError, SystemExit):  # the latter is what rich makes of the former
        drop(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None:  # of another file than stdout
            raise
        drop(sys.stdout)
        return complain(f"cannot write the output: {error.strerror or error}")
    return status


def _run(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(application())
    try:
        # As the command's own `main` does it, but without exit status 1 for a closed pipe.
        with command.make_context("python -m jln", list(arguments) or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except UserError as error:
        return complain(str(error))
    except _UsageError as error:
        return complain(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
    except MemoryError as error:
        return complain(f"not enough memory: {error}")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return complain(f"not enough memory: {error}")
        raise
    except (KeyboardInterrupt, typer.Abort):
        return complain("interrupted", status=130)
    return 0
