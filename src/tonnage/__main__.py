"""`python -m tonnage` is `tonnage`."""

import sys


def main() -> None:
    """The program; Ctrl-C while it is still being imported ends it like one that comes later."""
    try:
        from tonnage.cli.main import main as program
    except KeyboardInterrupt:
        print("error: interrupted.", file=sys.stderr)
        sys.exit(130)
    program()


if __name__ == "__main__":
    main()
