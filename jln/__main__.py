"""The command line: `python -m jln doctor`, `python -m jln check`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

import jax

from jln import doctor
from jln._triton import target
from jln._triton.chip import platform_of
from jln.testing import operators
from jln.testing.report import unknown


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m jln", description="LayerNorm for JAX: what runs here, and is it right?")
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, what the operators run on, how to mend what is missing")
    check = commands.add_parser("check", help="values and gradients of the operators beside float64; 1 if one is wrong")
    check.add_argument("operators", nargs="*", metavar="OPERATOR", help="by name (default: all)")
    said = "may be repeated (default: {})".format
    dtype = {"type": lambda name: operators.ALIASES.get(name.lower(), name.lower()), "choices": operators.DTYPES}
    check.add_argument("--dtype", action="append", **dtype, help=said("bfloat16 and float32") + "; bf16 is bfloat16")
    check.add_argument("--implementation", action="append", choices=("xla", "triton"), help=said("those that run here"))
    check.add_argument("--seconds", type=float, default=float("inf"), help="begin no further check after so many")
    return made


def main() -> int:
    given = parser().parse_args()
    names = sorted({form.name for form in operators.FORMS.values()})
    for name in {*given.operators} - {*names} if given.command == "check" else ():
        parser().error(unknown("operator", name, names))
    try:
        local = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        print(f"jln: no device: {next(iter(str(error).split(chr(10))), '') or type(error).__name__}")
        return 2
    if given.command == "doctor":
        return doctor.run(local)
    if importlib.util.find_spec("triton") and local[0].platform == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    forms = [f for f in operators.FORMS if not given.operators or operators.FORMS[f].name in given.operators]
    why = target.missing(platform_of(local[0]))
    asked = [*dict.fromkeys(given.implementation or (["xla"] if why else ["triton", "xla"]))]
    if why and "triton" in asked:
        parser().error(f"triton cannot run: {why}")
    return operators.run(forms, [*dict.fromkeys(given.dtype or ["bfloat16", "float32"])], asked, given.seconds)


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader has gone, as in `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again to write the rest
        status = 141
    sys.exit(status)
