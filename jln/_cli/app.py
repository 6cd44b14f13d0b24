"""The table of commands, and how a run of one ends: 0 for good, 1 for a finding, 2 with one line for a bad request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import typer

from jln._cli import bench, check, doctor, report, tune
from jln._cli.console import UserError, complain

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
    """-> the exit status"""
    try:
        status = application()(list(arguments) or ["--help"], prog_name="python -m jln", standalone_mode=False)
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
    return status if isinstance(status, int) else 0
