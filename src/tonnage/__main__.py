"""Run `tonnage` as `python -m tonnage`."""

import sys


def main() -> None:
    """Run the program; Ctrl-C during its imports ends it with the same message and exit code as later."""
    try:
        from tonnage.cli.main import main as program
    except KeyboardInterrupt:
        print("error: interrupted.", file=sys.stderr)
        sys.exit(130)
    program()


if __name__ == "__main__":
    main()
