"""Errors of the native operators, as the exceptions that they name."""

import re

_EXCEPTIONS = {
    "ValueError": ValueError,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
}
_PATTERN = re.compile(r"^\[(\w+)\] (.*)", re.DOTALL)


def translated(error: RuntimeError) -> Exception:
    """The exception that a native operator meant.

    torch's dispatcher throws every error as a ``RuntimeError``; the operators begin their messages with the name of the
    exception.
    """
    match = _PATTERN.match(str(error))
    if match is None:
        return error
    message = match.group(2).split("\nException raised from", 1)[0].rstrip()
    return _EXCEPTIONS.get(match.group(1), RuntimeError)(message)


def wrong_features(x, rows: int, cols: int) -> RuntimeError:
    """The error of ``F.linear`` for an input whose last dimension is not that of a weight ``[rows, cols]``."""
    return RuntimeError(
        f"linear(): input and weight shapes cannot be multiplied ({tuple(x.shape)} and {(rows, cols)}): the last "
        f"dimension of the input must be {cols}"
    )
