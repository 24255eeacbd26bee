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
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from common import ROOT, Child, Children, beside, build, measuring, spread, stubs, turns
from common import options as common_options

HERE = pathlib.Path(__file__).resolve().parent

NAMES = {
    "go": "Go client",
    "numpy": "Python, ordinary memory",
    "empty": "Python, client.empty()",
    "stock": "grpcio, our wire, CRC-32",
    "flight": "pyarrow Flight, no checksum",
    "flight-crc": "pyarrow Flight, CRC-32",
    "torch": "torch.distributed.rpc, no checksum",
    "worker": "Go client, Python worker",
    "bare": "bare socket, two Pythons",
    "unary": "grpcio unary",
    "grpc": "grpcio stream",
    "model": "Python, a model in Python",
    "whole": "Python, one call",
    "alone": "unsplit",
}
EVERYBODY = ("go", "numpy", "empty", "stock", "flight", "flight-crc", "torch")
# What is done: its title, who does it, what they are told to do, and whether its time counts, not its rate.
WORKS = {
    "upload": ("upload of", EVERYBODY, "sink", False),
    "echo": ("echo of", (*EVERYBODY, "worker"), "echo", False),
    "call": ("call of 30 KB", EVERYBODY, "echo", True),
    "tiny": ("relu of 512 bytes", ("unary", "grpc", "numpy", "model"), "relu", True),
    "small": ("relu of 30 KB", ("unary", "grpc", "numpy", "model"), "relu", True),
    "link": ("link alone, 256 KiB", ("numpy", "bare"), "loop", True),
    "step": ("step of 8 KiB", ("grpc", "numpy"), "step", True),
    "prompt": ("step of 2 000 rows of 3 KiB", ("whole", "numpy"), "prompt", True),
    "token": ("token of a GPT split in three", ("alone", "grpc", "numpy"), "token", True),
    "beyond": ("the same less unsplit", ("grpc", "numpy"), "token", True),
    "crowd": ("token of 8 such clients at once", ("grpc", "numpy"), "crowd", True),
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
    ("tiny", "numpy", "unary", 0.85),
    ("small", "numpy", "unary", 0.85),
    ("tiny", "model", "unary", 1.3),
    ("small", "model", "unary", 1.3),
    ("step", "numpy", "grpc", 1.2),
    ("prompt", "numpy", "whole", 1.15),
    ("beyond", "numpy", "grpc", 1.2),
    ("crowd", "numpy", "grpc", 1.0),
)


class Crowd(list[Child]):
    """Clients of a kind. The first works alone, unless all write text at once."""

    def ask(self, op: str, size: int, count: int) -> dict:
        if op != "crowd":
            return self[0].ask(op, size, count)
        start = time.perf_counter()
        with ThreadPoolExecutor(len(self)) as pool:
            list(pool.map(lambda child: child.ask("token", size, count), self))
        return {"seconds": [(time.perf_counter() - start) / count / len(self)]}


def open_all(options: argparse.Namespace, children: Children, folder: str) -> tuple[dict, dict[str, str]]:
    """Return who can be asked, by name, and why others cannot."""
    models = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    named = {"worker": "echo", "model": "relu", "steps": "steps", "trunk": "trunk"}
    served = [f"--python={name}=models:{what}" for name, what in named.items()]
    server = children.serve(options.program, "--log-level", "warn", "--python-threads", "1", *served, PYTHONPATH=models)
    go, ends = children.start(build(options.go, "./goend", folder)), HERE / "ends.py"
    clients = {name: lambda work, *more, name=name: go.ask("worker" if name == "worker" else work, server, *more)
               for name in ("go", "worker")}  # fmt: skip
    rows = children.start(sys.executable, ends, "grpc-server").said
    for kind, at, n in (("numpy", server, 8), ("empty", server, 1), ("bare", server, 1), ("grpc", rows, 8)):
        command = sys.executable, ends, kind, at
        clients[kind] = Crowd(children.start(*command, TENSORFERRY_BIN=options.program) for _ in range(n)).ask
    for kind, who in (("whole", "numpy"), ("alone", "numpy"), ("model", "numpy"), ("unary", "grpc")):
        clients[kind] = lambda _, *more, kind=kind, who=who: clients[who](kind, *more)
    generated = os.path.join(folder, "stubs")
    stubs(sys.executable, generated, "tensorferry/v1/tensorferry.proto")
    # The stubs are of the package's name, which may be installed; with this they go before it.
    pathlib.Path(generated, "tensorferry", "__init__.py").touch()
    path = os.pathsep.join((generated, str(ROOT / "examples" / "python")))
    clients["stock"] = children.start(sys.executable, ends, "stock", server, PYTHONPATH=path).ask
    missing = {}
    for kind in ("flight", "flight-crc", "torch"):
        python = options.torch_python if kind == "torch" else sys.executable
        peer = children.start(python, ends, f"{kind}-server", GLOG_minloglevel="1").said
        if peer.startswith("missing"):
            missing[kind] = peer
        else:
            clients[kind] = children.start(python, ends, kind, peer, GLOG_minloglevel="1").ask
    return clients, missing


def run(options: argparse.Namespace, clients: dict) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of every round, by work and who."""
    o = options
    tokens = min(o.calls, 200)
    sizes = {
        "upload": (o.size, 1), "echo": (o.size, 1), "call": (30_000, o.calls), "link": (256 << 10, o.calls),
        "tiny": (512, o.calls), "small": (30_000, o.calls), "step": (8 << 10, o.calls),
        "prompt": (2000 * 3072, o.calls // 50), "token": (0, tokens), "crowd": (0, tokens),
    }  # fmt: skip
    samples = {}
    for work in o.works or sizes:
        (size, count), (_, who, op, _) = sizes[work], WORKS[work]
        asked = {
            name: lambda ask=clients[name]: statistics.median(ask(op, size, count)["seconds"])  # noqa: B023
            for name in who
            if name in clients
        }
        samples[work] = turns(work, o.rounds, asked)
    if token := samples.get("token"):
        samples["beyond"] = {name: [a - b for a, b in zip(token[name], token["alone"])] for name in WORKS["beyond"][1]}
    return samples


def ratio(work: str, ours: list[float], theirs: list[float]) -> tuple[float, str]:
    """Return the ratio within a round, of times where they count, else of rates, and what is said of it."""
    a, b = (ours, theirs) if WORKS[work][3] else (theirs, ours)
    return spread([x / y for x, y in zip(a, b)])[0], beside(a, b)


def report(samples: dict[str, dict[str, list[float]]], size: int, missing: dict[str, str]) -> None:
    for work, times in samples.items():
        title, _, _, timed = WORKS[work]
        first = "bare" if work == "link" else next(iter(times))
        unit, head = ("µs", "time") if timed else ("ms", "GB/s    rate")
        print(f"\n{title if timed else f'{title} {size >> 20} MiB':36} {unit:>9}   {head} to that of: {NAMES[first]}")
        for name, all in times.items():
            median = statistics.median(all)
            rate = "" if timed else f"{size / median / 1e9:7.2f}"
            compared = "" if name == first else ratio(work, all, times[first])[1]
            print(f"  {NAMES[name]:34} {median * (1e6 if timed else 1e3):9.1f} {rate:7}   {compared}".rstrip())
    print(f"\n{'required':59} {'ratio':12}  measured")
    for work, name, other, want in REQUIRED:
        times = samples.get(work, {})
        if name in times and other in times:
            got, measured = ratio(work, times[name], times[other])
            met = got <= want if WORKS[work][3] else got >= want
            said = f"{want:.2f} or {'less' if WORKS[work][3] else 'more'}"
            print(f"  {f'{work}: {NAMES[name]} / {NAMES[other]}':57} {said:12}  {measured}, {'' if met else 'not '}met")
    for name, why in missing.items():
        print(f"{NAMES[name]}: {why}")


def versions() -> str:
    return "".join(f", {name} {version(name)}" for name in ("numpy", "pyarrow", "grpcio", "protobuf"))


def main() -> None:
    flags = common_options("Measure the Python client beside the Go client and others.", 25)
    flags.add_argument("--size", type=int, default=256 << 20, help="bytes of the tensor")
    flags.add_argument("--calls", type=int, default=500, help="small calls of a round")
    flags.add_argument("--works", nargs="+", choices=WORKS.keys() - {"beyond"}, help="what is done; default: all")
    flags.add_argument("--json", metavar="FILE", help="write every sample to a file, too")
    flags.add_argument("--torch-python", default=sys.executable, help="Python that has torch, if this has not")
    options = flags.parse_args()
    if options.quick:
        options.rounds, options.size, options.calls = 1, 16 << 20, 50
    if options.calls < 1 or options.size < 8 or options.size % 8:
        flags.error("calls are 1 or more, and the size is a multiple of 8")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with measuring(options, versions()) as folder, Children() as children:
        clients, missing = open_all(options, children, folder)
        samples = run(options, clients)
        report(samples, options.size, missing)
        if options.json:
            said = {"versions": versions(), "size": options.size, "seconds": samples, "missing": missing}
            pathlib.Path(options.json).write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
