"""What the benchmarks share: processes that answer lines, turns, medians, and a table's line."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 300  # the most for one line


class Child:
    """A process that answers lines. It ends with its input."""

    def __init__(self, *command: object, **env: str):
        self.command = [str(c) for c in command]
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**clean(), **env}
        )
        self.said = self.hear()

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

    def ask(self, *words: object) -> dict:
        """Have it do something, and return what it says of that."""
        print(*words, file=self.process.stdin, flush=True)
        return json.loads(self.hear())

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Children(list[Child]):
    """Processes, of which the last started ends first."""

    def start(self, *command: object, **env: str) -> Child:
        self.append(Child(*command, **env))
        return self[-1]

    def serve(self, program: str, *flags: object, **env: str) -> str:
        """Start a server of tensorferry, and return its address."""
        common = ("serve", "--child", "--listen", "127.0.0.1:0", "--metrics", "off", "--engine", "cpu")
        return self.start(program, *common, *flags, TENSORFERRY_PYTHON=sys.executable, **env).said

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self):
            child.close()


def clean() -> dict[str, str]:
    """Return the environment without what serve takes for its settings."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_")}


def answer(works: dict[str, Callable]) -> None:
    """Be a process that answers lines: a work, and numbers or addresses."""
    print("ready", flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        print(json.dumps(works[name](*(int(w) if w.isdigit() else w for w in words))), flush=True)


def turns(what: str, rounds: int, who: dict[str, Callable]) -> dict[str, list]:
    """Have everybody work in each round, each time another first, and return what they say of it."""
    said: dict[str, list] = {name: [] for name in who}
    order = list(who)
    for i in range(-1, rounds):  # the first is for what nobody has touched
        print(f"bench: {what}, round {i + 1} of {rounds}", file=sys.stderr)
        at = i % len(order)
        for name in order[at:] + order[:at]:
            answered = who[name]()
            if i >= 0:
                said[name].append(answered)
    return said


def spread(all: list[float]) -> tuple[float, float]:
    """Return the median, and half the width of what encloses the true one in 95 of 100 runs.

    With fewer than 6 values that is half of what they span; internal/bench has the same.
    """
    n, k, outside = len(all), 0, 0.0
    while (outside := outside + 2 * math.comb(n, k) / 2**n) <= 0.05:
        k += 1
    k = max(k - 1, 0)
    ordered = sorted(all)
    return statistics.median(ordered), (ordered[n - 1 - k] - ordered[k]) / 2


def beside(a: list[float], b: list[float]) -> str:
    """Return the ratios within a round."""
    return "{:.2f} ± {:.2f}".format(*spread([x / y for x, y in zip(a, b)]))


def line(title: str, all: list[float], unit: str, *more: str) -> None:
    print(f"  {title:44} {'{:10.1f} ± {:.1f}'.format(*spread(all)):20} {unit:9}", *more)


def options(about: str, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="run everything briefly: the figures mean nothing")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--program", default=os.environ.get("TENSORFERRY_BIN"), help="instead of this tree's")
    parser.add_argument("--go", default=os.environ.get("GO", "go"), help="the go command")
    return parser


@contextmanager
def measuring(options: argparse.Namespace, more: str = "") -> Iterator[str]:
    """Print where the figures come from, build the program unless there is one, and lend a folder."""
    if options.rounds < 1:
        sys.exit("bench: rounds are 1 or more")
    asked = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    processor = found[1] if found else platform.machine()
    begin, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        options.program = options.program or build(options.go, "./cmd/tensorferry", folder, ROOT)
        options.program = shutil.which(os.path.abspath(options.program)) or options.program
        print(f"{processor}, {len(os.sched_getaffinity(0))} cores, load {load:.1f} · {time.strftime('%Y-%m-%d')}")
        print(f"commit {commit}, python {platform.python_version()}{more}")
        print(f"{options.rounds} rounds in turns: medians, ± encloses the true one in 95 of 100 runs")
        yield folder
    print(f"\nload {os.getloadavg()[0]:.1f} at the end, after {time.monotonic() - begin:.0f} s")
    if options.quick:
        print("--quick: the figures mean nothing")


def build(go: str, package: str, folder: str, module: pathlib.Path = ROOT / "bench") -> str:
    """Build a Go program into a folder, and return it."""
    program = os.path.join(folder, os.path.basename(package))
    subprocess.run([go, "build", "-o", program, package], cwd=module, check=True)
    return program


def stubs(python: str, folder: str, *protos: str) -> None:
    """Write the stubs of contracts of api/ into a folder."""
    os.makedirs(folder, exist_ok=True)
    out = f"--python_out={folder}", f"--grpc_python_out={folder}"
    subprocess.run([python, "-m", "grpc_tools.protoc", f"-I{ROOT / 'api'}", *out, *protos], check=True)


def rpc_server() -> None:
    """Be the server of torch.distributed.rpc. It prints the address where a client must meet it."""
    try:
        import torch.distributed.rpc  # noqa: F401
    except ImportError as err:
        print(f"missing: {err}", flush=True)
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*s.getsockname())
    print(address, flush=True)
    join(0, address).shutdown()


def join(rank: int, address: str):
    """Return torch.distributed.rpc, whose two ends meet at an address."""
    import torch.distributed.rpc as rpc

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    # TCP, as tensorferry has it: without shared memory, which it takes where both are on one machine.
    how = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{address}", rpc_timeout=120, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(f"end{rank}", rank=rank, world_size=2, rpc_backend_options=how)
    return rpc
