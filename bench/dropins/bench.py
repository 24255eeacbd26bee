"""Measures the two drop-in services beside the least servers in Python: make bench-dropins.

The servers take turns, and a ratio is taken within a round. The clients are Python's, as the users of
the two predecessors have them, and Go's. It prints a table with what is wanted, and judges no time.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import socket
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "python"))
import common  # noqa: E402
from common import Children, beside, spread, turns  # noqa: E402

BIG, SMALL = 64 << 20, 30 << 10
PROTOS = ("kpu/torch/server/service.proto", "splitlearn/comm/compute_service.proto")
# What is done, by which client, with how many bytes, and what is wanted: of the other's rate, or of its time.
WORKS = (
    ("kpu_upload", "python", BIG, 1.5),
    ("kpu_echo", "python", BIG, 1.2),
    ("kpu_echo", "python", SMALL, 0.7),
    ("split_echo", "python", BIG, 1.2),
    ("split_echo", "python", SMALL, 0.7),
    ("kpu_upload", "go", BIG, None),
    ("kpu_echo", "go", BIG, 1.6),
    ("kpu_echo", "go", SMALL, 0.5),
    ("split_echo", "go", BIG, 1.3),
    ("split_echo", "go", SMALL, 0.5),
)


def measure(options: argparse.Namespace, folder: str) -> None:
    common.stubs(options.grpc, folder, *PROTOS)
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([options.grpc, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    with Children() as children:

        def ferry(model: str) -> dict[str, str]:
            with socket.socket() as a, socket.socket() as b:
                for s in (a, b):
                    s.bind(("127.0.0.1", 0))
                at = {name: f"127.0.0.1:{s.getsockname()[1]}" for name, s in (("kpu", a), ("split", b))}
            services = (
                f"--{flag}={at[name]},model={model}" for flag, name in (("kpu", "kpu"), ("splitlearn", "split"))
            )
            children.serve(options.program, *services)
            return at

        python = [options.torch, HERE / "ends.py"]
        theirs = children.start(*python, "server", folder, site).said.split()
        who = {"ours": ferry("echo"), "theirs": dict(zip(("kpu", "split"), theirs))}
        clients = {
            "python": children.start(*python, "client", folder, site),
            "go": children.start(common.build(options.go, "./goend", folder)),
        }
        print(f"{'':36} {'tensorferry':>16} {'Python server':>16}   ratio")
        for work, client, size, wanted in WORKS:
            count = 1 if size == BIG else options.calls
            said = turns(f"{client}: {work}", options.rounds, {
                name: functools.partial(clients[client].ask, work, at[work.split("_")[0]], size, count)
                for name, at in who.items()
            })  # fmt: skip
            took = {name: [statistics.median(x["seconds"]) for x in all] for name, all in said.items()}
            took["own"] = [x.get("own", 0) for all in said.values() for x in all]
            line(work, client, size, took, wanted)
        rows = ferry("relu")
        first = [clients["go"].ask("kpu_first", rows["kpu"], options.first, 1) for _ in range(options.rounds)]
        print("first result of {} MiB through relu: in {:.1%} ± {:.1%} of the whole time, wanted 5%".format(
            options.first >> 20, *spread([f["first"] / f["seconds"][0] for f in first])))  # fmt: skip


def line(work: str, who: str, size: int, took: dict[str, list[float]], wanted: float | None) -> None:
    big = size == BIG
    title = f"{who}: {work.replace('_', ' ')} of {'64 MiB' if big else '30 KiB'}"
    ours, theirs = took["ours"], took["theirs"]
    medians = map(statistics.median, (ours, theirs))
    figures = [f"{size / s / 1e9:.3f} GB/s" if big else f"{s * 1e6:.0f} µs" for s in medians]
    ratio = beside(theirs, ours) if big else beside(ours, theirs)
    goal = "" if wanted is None else f", wanted {'at least' if big else 'at most'} {wanted}"
    own = statistics.median(took["own"])
    cpu = f", client's CPU {own * 1e6:.0f} µs" if own and not big else ""
    print(f"{title:36} {figures[0]:>16} {figures[1]:>16}   {ratio}{goal}{cpu}")


def main() -> None:
    parser = common.options("Measure the drop-in services beside Python servers.", 7)
    parser.add_argument("--torch", default=sys.executable, help="a Python that has torch and numpy")
    parser.add_argument("--grpc", default=sys.executable, help="a Python of the same version with grpcio-tools")
    parser.add_argument("--calls", type=int, default=200, help="small calls in a round")
    options = parser.parse_args()
    options.first = 256 << 20
    if options.quick:
        options.rounds, options.calls, options.first = 1, 5, 32 << 20
    if subprocess.run([options.torch, "-c", "import torch"], capture_output=True, check=False).returncode:
        print(f"bench: {options.torch} has no torch: nothing to measure")
        return
    with common.measuring(options) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
