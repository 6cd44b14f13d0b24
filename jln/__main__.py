"""The command line: `python -m jln doctor`, `python -m jln check`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from jln import doctor
from jln.testing import operators


def parser() -> argparse.ArgumentParser:
    about = "LayerNorm for JAX: what will it do here, and is it right?"
    made = argparse.ArgumentParser("python -m jln", description=about)
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, what the operators run on, how to mend what is missing")
    check = commands.add_parser("check", help="values and gradients of the operators beside float64; 1 if one is wrong")
    check.add_argument("operators", nargs="*", metavar="OPERATOR", help="by name (default: all)")
    said = "may be repeated (default: {})".format
    check.add_argument("--dtype", action="append", choices=operators.DTYPES, help=said("bfloat16 and float32"))
    check.add_argument("--implementation", action="append", choices=("xla", "triton"), help=said("those that run here"))
    return made


def main() -> int:
    given = parser().parse_args()
    names = {form.name for form in operators.FORMS.values()}
    if given.command == "check" and (unknown := {*given.operators} - names):
        parser().error(f"unknown operator {' '.join(sorted(unknown))}; known are {', '.join(sorted(names))}")
    try:
        local = doctor.devices()
    except (RuntimeError, AssertionError) as error:
        print(f"jln: no device: {str(error).partition(chr(10))[0]}")
        return 2
    if given.command == "doctor":
        return doctor.run(local)
    if importlib.util.find_spec("triton") and local[0].platform == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    forms = [f for f in operators.FORMS if not given.operators or operators.FORMS[f].name in given.operators]
    reasons = doctor.implementations(local[0])
    asked = [*dict.fromkeys(given.implementation or (name for name, why in reasons.items() if why is None))]
    if cannot := [f"{name} cannot run: {reasons[name]}" for name in asked if reasons[name] is not None]:
        parser().error("; ".join(cannot))
    return operators.run(forms, [*dict.fromkeys(given.dtype or ["bfloat16", "float32"])], asked)


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
