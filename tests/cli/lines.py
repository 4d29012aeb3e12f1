"""What an error of the command line looks like."""


def is_one_line(text: str) -> bool:
    """Whether an error is what it should be."""
    return text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text
