"""The form of an error on the command line."""


def is_one_line(text: str) -> bool:
    """Return True if a text is a proper error: one line, without a traceback."""
    return text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text
