"""Measures the Python client beside the Go client and others: make bench-python.

One tensorferry server, one client process for each who takes part, and everybody in turns:
a ratio is taken within a round. It prints a table with what is required, and judges nothing.
docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version

from child import Child

from tensorferry import _program

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

NAMES = {
    "go": "Go client",
    "numpy": "Python, ordinary memory",
    "empty": "Python, client.empty()",
    "stock": "stock_grpcio.py, CRC-32",
    "flight": "pyarrow Flight, no checksum",
    "flight-crc": "pyarrow Flight, CRC-32",
    "torch": "torch.distributed.rpc, no checksum",
    "worker": "Go client, Python worker",
    "bare": "bare socket, two Pythons",
}
EVERYBODY = ("go", "numpy", "empty", "stock", "flight", "flight-crc", "torch")
# What is done: its title, who does it, and what they are told to do.
WORKS = {
    "upload": ("upload of", EVERYBODY, "sink"),
    "echo": ("echo of", (*EVERYBODY, "worker"), "echo"),
    "call": ("call of", EVERYBODY, "echo"),
    "link": ("link alone,", ("numpy", "bare"), "loop"),
}
# What is required: the work, who, beside whom, and the ratio: of rates, or of times for calls.
REQUIRED = (
    ("upload", "numpy", "go", 0.8),
    ("echo", "numpy", "go", 0.8),
    ("upload", "empty", "go", 0.95),
    ("echo", "empty", "go", 0.95),
    ("call", "numpy", "go", 1.6),
    ("upload", "numpy", "stock", 3),
    ("echo", "numpy", "stock", 3),
    ("echo", "worker", "go", 0.7),
)
LINK_MICROS = 60


class Bench:
    """Everybody who takes part, by name."""

    def __init__(self, options: argparse.Namespace, folder: str):
        self.options, self.folder = options, folder
        self.children: list[Child] = []
        self.clients: dict[str, Child] = {}
        self.missing: dict[str, str] = {}  # why, by who

    def start(self, *command: object, **env: str) -> Child:
        child = Child(*command, **env)
        self.children.append(child)
        return child

    def close(self) -> None:
        for child in reversed(self.children):
            child.close()

    def open(self, program: str) -> None:
        models = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        server = self.start(
            program, "serve", "--child", "--listen", "127.0.0.1:0", "--metrics", "off", "--engine", "cpu",
            "--log-level", "warn", "--python", "worker=models:echo",
            PYTHONPATH=models, TENSORFERRY_PYTHON=sys.executable,
        ).ready()  # fmt: skip
        goclient = os.path.join(self.folder, "goclient")
        subprocess.run([self.options.go, "build", "-o", goclient, "./goclient"], cwd=ROOT / "bench", check=True)
        self.clients["go"] = self.clients["worker"] = self.start(goclient, server.said).ready()
        ends = HERE / "ends.py"
        for kind in ("numpy", "empty", "bare"):
            self.clients[kind] = self.start(sys.executable, ends, kind, server.said, TENSORFERRY_BIN=program).ready()
        stubs = {"PYTHONPATH": os.pathsep.join((self.folder, str(ROOT / "examples" / "python")))}
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", "-I", "api", f"--python_out={self.folder}",
             f"--grpc_python_out={self.folder}", "api/tensorferry/v1/tensorferry.proto"],
            cwd=ROOT, check=True,
        )  # fmt: skip
        # The stubs are of the package's name, which may be installed; with this they go before it.
        pathlib.Path(self.folder, "tensorferry", "__init__.py").touch()
        self.clients["stock"] = self.start(sys.executable, ends, "stock", server.said, **stubs).ready()
        for kind in ("flight", "flight-crc", "torch"):
            python = self.options.torch_python if kind == "torch" else sys.executable
            peer = self.start(python, ends, f"{kind}-server", GLOG_minloglevel="1").ready()
            if peer.said.startswith("missing"):
                self.missing[kind] = peer.said
                continue
            self.clients[kind] = self.start(python, ends, kind, peer.said, GLOG_minloglevel="1").ready()

    def run(self) -> dict[str, dict[str, list[float]]]:
        """Return the seconds of every round, by work and who."""
        o = self.options
        sizes = {"upload": (o.size, 1), "echo": (o.size, 1), "call": (30_000, o.calls), "link": (256 << 10, o.calls)}
        samples: dict[str, dict[str, list[float]]] = {}
        for work, (size, count) in sizes.items():
            _, who, op = WORKS[work]
            here = [name for name in who if name in self.clients]
            times = samples[work] = {name: [] for name in here}
            for i in range(-1, o.rounds):  # the first is for memory that nobody has touched
                print(f"bench: {work}, round {i + 1} of {o.rounds}", file=sys.stderr)
                at = i % len(here)
                for name in here[at:] + here[:at]:
                    took = float(self.clients[name].ask("worker" if name == "worker" else op, size, count))
                    if i >= 0:
                        times[name].append(took)
        return samples


def ratio(work: str, ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the median over the rounds, and half the distance between the quartiles."""
    pairs = zip(ours, theirs) if work in ("call", "link") else zip(theirs, ours)
    all = [a / b for a, b in pairs]
    if len(all) < 2:
        return all[0], 0.0
    low, _, high = statistics.quantiles(all, n=4, method="inclusive")
    return statistics.median(all), (high - low) / 2


def report(samples: dict[str, dict[str, list[float]]], size: int, missing: dict[str, str]) -> str:
    lines = []
    for work, times in samples.items():
        title = WORKS[work][0]
        if work in ("upload", "echo"):
            lines.append(f"{f'{title} {size >> 20} MiB':36} {'ms':>9} {'GB/s':>7}   rate to Go's")
        else:
            lines.append(
                f"{title + (' 30 KB' if work == 'call' else ' 256 KiB'):36} {'µs':>9} {'':7}   time to "
                + ("Go's" if work == "call" else "the bare socket's")
            )
        for name, all in times.items():
            median = statistics.median(all)
            line = f"  {NAMES[name]:34} {median * (1e3 if work in ('upload', 'echo') else 1e6):9.1f} "
            line += f"{size / median / 1e9:7.2f}" if work in ("upload", "echo") else " " * 7
            if work == "link" and name != "bare":
                line += "   {:.2f} ± {:.2f}".format(*ratio(work, all, times["bare"]))
            if "go" in times and name != "go":
                line += "   {:.2f} ± {:.2f}".format(*ratio(work, all, times["go"]))
            lines.append(line.rstrip())
        lines.append("")
    lines.append(f"{'required':59} {'ratio':12}  measured")
    for work, name, beside, want in REQUIRED:
        times = samples[work]
        if name in times and beside in times:
            got, spread = ratio(work, times[name], times[beside])
            met, more = got >= want, "more"
            if work == "call":
                met, more = got <= want, "less"
            title = f"{work}: {NAMES[name]} / {NAMES[beside]}"
            lines.append(required(title, f"{want:.2f} or {more}", f"{got:.2f} ± {spread:.2f}", met))
    micros = statistics.median(samples["link"]["numpy"]) * 1e6
    met = micros <= LINK_MICROS
    lines.append(required("link alone, 256 KiB", f"{LINK_MICROS} µs or less", f"{micros:.1f} µs", met))
    lines += [f"{NAMES[name]}: {why}" for name, why in missing.items()]
    return "\n".join(lines)


def required(title: str, want: str, got: str, met: bool) -> str:
    return f"  {title:57} {want:12}  {got}, {'' if met else 'not '}met"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("numpy", "pyarrow", "grpcio", "protobuf"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def main() -> None:
    flags = argparse.ArgumentParser(description="Measure the Python client beside the Go client and others.")
    flags.add_argument("--quick", action="store_true", help="run everything briefly: the figures mean nothing")
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--size", type=int, default=256 << 20, help="bytes of the tensor")
    flags.add_argument("--calls", type=int, default=500, help="small calls of a round")
    flags.add_argument("--json", metavar="FILE", help="write every sample to a file, too")
    flags.add_argument("--torch-python", default=sys.executable, help="Python that has torch, if this has not")
    flags.add_argument("--go", default=os.environ.get("GO", "go"), help="the go command")
    options = flags.parse_args()
    if options.quick:
        options.rounds, options.size, options.calls = 1, 16 << 20, 50
    if options.rounds < 1 or options.calls < 1 or options.size < 4 or options.size % 4:
        flags.error("rounds and calls are 1 or more, and the size is whole float32s")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder)
        try:
            bench.open(_program.find())
            samples = bench.run()
        finally:
            bench.close()
    if options.json:
        said = {
            "cpus": os.cpu_count(), "load": os.getloadavg(), "versions": versions(), "size": options.size,
            "calls": options.calls, "seconds": samples, "missing": bench.missing,
        }  # fmt: skip
        pathlib.Path(options.json).write_text(json.dumps(said) + "\n")
    print(", ".join(f"{k} {v}" for k, v in versions().items()))
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the end, {options.rounds} rounds: medians,")
    print("± half the distance between the quartiles of the ratios within a round\n")
    print(report(samples, options.size, bench.missing))
    if options.quick:
        print("--quick: the figures mean nothing")


if __name__ == "__main__":
    main()
