"""The command line tool, for tests of files that both write and read."""

import os
import pathlib
import subprocess

import pytest


def _found():
    """The binary that TWOFOUR_COMMAND names, or else the newest that cargo has built in this tree."""
    named = os.environ.get("TWOFOUR_COMMAND")
    if named is not None:
        return named
    target = pathlib.Path(__file__).parents[2] / "target"
    built = [path for path in (target / "release" / "twofour", target / "debug" / "twofour") if path.is_file()]
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


COMMAND = _found()
needs_command = pytest.mark.skipif(
    COMMAND is None, reason="no twofour binary: `cargo build -p twofour-cli`, or name one in TWOFOUR_COMMAND"
)


def command(*arguments):
    """What the command prints. It must succeed."""
    done = subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
