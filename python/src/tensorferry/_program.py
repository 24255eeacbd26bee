"""Finds the tensorferry program, and is the command of that name.

The program is $TENSORFERRY_BIN, else the one inside the package, else the first on
PATH. The command replaces this process by it; python -m tensorferry is the same command.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys

from ._errors import LinkError


def find() -> str:
    """Return the path of the program. LinkError says where it was looked for."""
    named = os.environ.get("TENSORFERRY_BIN")
    if named and not _is_command(named):
        if os.path.isfile(named) and os.access(named, os.X_OK):
            return named
        raise LinkError(f"TENSORFERRY_BIN is {named!r}, which is not an executable file")
    bundled = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "tensorferry")
    if os.access(bundled, os.X_OK):
        return bundled
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        found = shutil.which("tensorferry", path=folder)
        if found and not _is_script(found):
            return found
    raise LinkError(
        "the tensorferry program is not in the package and not on PATH",
        hint="install the wheel, or set TENSORFERRY_BIN to the program",
    )


def environment() -> dict[str, str]:
    """Return the environment for the program: it starts its Python workers with this Python."""
    return {"TENSORFERRY_PYTHON": sys.executable, **os.environ}


def main() -> None:
    """Replace this process by the program."""
    try:
        program = find()
    except LinkError as err:
        sys.exit(f"tensorferry: {err}")
    own = str(os.getpid())
    if os.environ.get("_TENSORFERRY_STARTED") == own:  # by this process
        sys.exit(f"tensorferry: {program!r} starts this command again; set TENSORFERRY_BIN to the program")
    os.execve(program, [program, *sys.argv[1:]], {**environment(), "_TENSORFERRY_STARTED": own})


def _is_script(path: str) -> bool:
    # The console script of this package has the program's name and would start
    # itself for ever.
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True


def _is_command(path: str) -> bool:
    """Report whether a file is the command of this package, which looks for the program itself."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return b"tensorferry._program" in file.read(4096) and _is_script(path)
    return False
