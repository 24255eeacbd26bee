"""What the tests share: the program, a server in a process of its own, and skips."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from typing import Any, Optional

ROOT = pathlib.Path(__file__).resolve().parents[2]
try:
    import tensorferry  # noqa: F401
except ImportError:  # not installed: from the working tree
    sys.path.insert(0, str(ROOT / "python" / "src"))

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has those it starts in the background ignore it
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU computes other last bits than what the tests compare with
try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]
try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

needs_numpy = unittest.skipIf(numpy is None, "numpy is not installed")
needs_torch = unittest.skipIf(torch is None, "torch is not installed")
needs_ml_dtypes = unittest.skipIf(ml_dtypes is None, "ml_dtypes is not installed")


def program() -> str:
    """Return the program, or skip the test."""
    from tensorferry import LinkError, _program

    try:
        return _program.find()
    except LinkError as err:
        raise unittest.SkipTest(str(err)) from None


def interpreter_with_torch() -> Optional[str]:
    """Return a Python that has torch: this one, or the system's."""
    for python in (sys.executable, "/usr/bin/python3"):
        if (
            os.path.exists(python)
            and not subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode
        ):
            return python
    return None


def generated(case: type[unittest.TestCase], proto: str) -> tuple[Any, Any]:
    """Return the messages and the stubs that are generated from a file of api, for the tests of a class."""
    import grpc_tools
    from grpc_tools import protoc

    folder = tempfile.TemporaryDirectory()
    case.addClassCleanup(folder.cleanup)
    own = str(pathlib.Path(grpc_tools.__file__).parent / "_proto")
    to = [f"--python_out={folder.name}", f"--grpc_python_out={folder.name}"]
    assert protoc.main(["protoc", f"-I{ROOT / 'api'}", f"-I{own}", *to, proto + ".proto"]) == 0
    sys.path.insert(0, folder.name)
    case.addClassCleanup(sys.path.remove, folder.name)
    name = proto.replace("/", ".")
    return importlib.import_module(name + "_pb2"), importlib.import_module(name + "_pb2_grpc")


class Server:
    """A server on a free port. It ends with kill or stop.

    python is the interpreter of its models, this one by default. Another has modules of its own.
    """

    def __init__(self, *args: str, listen: str = "127.0.0.1:0", python: str = sys.executable):
        import tensorferry

        path = [p for p in sys.path if p]
        if python != sys.executable:
            path = [str(pathlib.Path(tensorferry.__file__).parents[1]), str(pathlib.Path(__file__).parent)]
        self.process = subprocess.Popen(
            [program(), "serve", "--listen", listen, "--metrics", "off", "--engine", "cpu", "--slow", *args],
            stderr=subprocess.PIPE,
            text=True,
            # serve takes variables of this prefix for its settings.
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_")},
                "TENSORFERRY_PYTHON": python,
                "PYTHONPATH": os.pathsep.join(path),
            },
        )
        said = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            said += line
            m = re.search(r"msg=listening address=(\S+)", line)
            if m:
                break
        else:
            raise AssertionError(f"the server did not start: {said}")
        self.address, self.said = m.group(1), said
        self._drain = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._drain.start()

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._end()

    def _end(self) -> None:
        self.process.wait()
        self._drain.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


class Served(unittest.TestCase):
    """A test case with a server and a client for all of its tests."""

    server: Server
    client: Any
    model = "echo"
    options: tuple[str, ...] = ()

    @classmethod
    def setUpClass(cls) -> None:
        import tensorferry as tf

        cls.server = Server(*cls.options)
        cls.addClassCleanup(cls.server.stop)
        cls.client = tf.connect(cls.server.address)
        cls.addClassCleanup(cls.client.close)


def pattern(n: int, seed: int = 1) -> bytes:
    """Return n bytes without a short period."""
    block = bytes((i * 131 + seed * 17 + (i >> 8) * 7) & 0xFF for i in range(min(n, 65521)))
    return (block * (n // max(len(block), 1) + 1))[:n]


def eventually(claim: Any, seconds: float = 10.0) -> None:
    """Wait until a claim holds."""
    deadline = time.monotonic() + seconds
    while not claim():
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not come to hold within {seconds} s")
        time.sleep(0.02)


def link_pid() -> Optional[int]:
    """Return the process of this process's link."""
    from tensorferry import _link

    return _link._process.pid if _link._process else None


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:" in line for line in file)


__all__ = [
    "ROOT", "Served", "Server", "descriptors", "eventually", "interpreter_with_torch", "link_pid", "mappings", "ml_dtypes", "needs_ml_dtypes",
    "needs_numpy", "needs_torch", "numpy", "pattern", "program", "shutil", "torch",
]  # fmt: skip
