"""The command line, `python -m jln`. It needs the extra `cli`; the library does not."""

import importlib.util
import sys


def main() -> int:
    missing = [package for package in ("typer", "rich") if importlib.util.find_spec(package) is None]
    if missing:
        needed = " and ".join(missing)
        print(f'jln: the command line needs {needed}: pip install -e ".[cli]" in a clone of jln', file=sys.stderr)
        return 2
    try:
        from jln._tools.app import run
    except KeyboardInterrupt:
        return 130
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
