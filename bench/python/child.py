"""What the benchmarks share: a process that answers lines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

SECONDS = 300  # the most for one line


class Child:
    """A process that answers lines. It ends with its input."""

    def __init__(self, *command: object, **env: str):
        # serve takes variables of this prefix for its settings.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_")}
        self.command = [str(c) for c in command]
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**clean, **env}
        )
        self.said = ""

    def ready(self) -> Child:
        self.said = self.hear()
        return self

    def hear(self) -> str:
        timer = threading.Timer(SECONDS, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            sys.exit(f"bench: {' '.join(self.command)} ended with {self.process.wait()}")
        return line.strip()

    def ask(self, *words: object) -> str:
        print(*words, file=self.process.stdin, flush=True)
        return self.hear()

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def meet() -> str:
    """Print the address where two processes of torch.distributed.rpc meet, and return it; empty without it."""
    try:
        import torch.distributed.rpc  # noqa: F401
    except ImportError as err:
        print(f"missing: {err}", flush=True)
        return ""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*s.getsockname())
    print(address, flush=True)
    return address
