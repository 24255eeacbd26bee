"""Measures the two drop-in services beside the least servers in Python: make bench-dropins.

The servers take turns, and a ratio is taken within a round. The clients are Python's, as the users of
the two predecessors have them, and Go's. It prints a table with what is wanted, and judges no time.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent / "python"))
from child import Child  # noqa: E402

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


def middle(all: list[float]) -> tuple[float, float]:
    """Return the median, and half the distance between the quartiles."""
    if len(all) < 2:
        return all[0], 0.0
    low, _, high = statistics.quantiles(all, n=4, method="inclusive")
    return statistics.median(all), (high - low) / 2


def measure(options: argparse.Namespace, folder: str) -> None:
    subprocess.run([options.go, "build", "-o", f"{folder}/goend", "./dropins"], cwd=ROOT / "bench", check=True)
    program = options.program
    if not program:
        program = f"{folder}/tensorferry"
        subprocess.run([options.go, "build", "-o", program, "./cmd/tensorferry"], cwd=ROOT, check=True)
    subprocess.run(
        [options.grpc, "-m", "grpc_tools.protoc", f"-I{ROOT / 'api'}",
         f"--python_out={folder}", f"--grpc_python_out={folder}", *PROTOS],
        check=True,
    )  # fmt: skip
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([options.grpc, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    children: list[Child] = []

    def start(*command: object) -> Child:
        children.append(Child(*command))
        return children[-1]

    def ferry(model: str) -> dict[str, str]:
        with socket.socket() as a, socket.socket() as b:
            for s in (a, b):
                s.bind(("127.0.0.1", 0))
            at = {name: f"127.0.0.1:{s.getsockname()[1]}" for name, s in (("kpu", a), ("split", b))}
        start(
            program, "serve", "--child", "--listen", "127.0.0.1:0", "--engine", "cpu",
            "--kpu", at["kpu"], "--kpu-model", model, "--splitlearn", at["split"], "--splitlearn-model", model,
        ).hear()  # fmt: skip
        return at

    try:
        ours = ferry("echo")
        theirs = dict(
            zip(("kpu", "split"), start(options.torch, HERE / "ends.py", "server", folder, site).hear().split())
        )
        clients = {
            "python": start(options.torch, HERE / "ends.py", "client", folder, site),
            "go": start(f"{folder}/goend"),
        }
        for child in clients.values():
            child.hear()
        print(f"{'':36} {'tensorferry':>16} {'Python server':>16}   ratio")
        for work, who, size, wanted in WORKS:
            count = 1 if size == BIG else options.calls
            took: dict[str, list[float]] = {"ours": [], "theirs": [], "own": []}
            for i in range(-1, options.rounds):  # the first is to get warm
                for name, at in (("ours", ours), ("theirs", theirs))[:: 1 if i % 2 else -1]:
                    said = json.loads(clients[who].ask(work, at[work.split("_")[0]], size, count))
                    if i >= 0:
                        took[name].append(statistics.median(said["seconds"]))
                        took["own"].append(said.get("own", 0))
            line(work, who, size, took, wanted)
        rows = ferry("relu")
        first = [
            json.loads(clients["go"].ask("kpu_first", rows["kpu"], options.first, 1)) for _ in range(options.rounds)
        ]
        print("first result of {} MiB through relu: in {:.1%} ± {:.1%} of the whole time, wanted 5%".format(
            options.first >> 20, *middle([f["first"] / f["seconds"][0] for f in first])))  # fmt: skip
    finally:
        for child in reversed(children):
            child.close()


def line(work: str, who: str, size: int, took: dict[str, list[float]], wanted: float | None) -> None:
    big = size == BIG
    title = f"{who}: {work.replace('_', ' ')} of {'64 MiB' if big else '30 KiB'}"
    if big:
        figures = [f"{statistics.median(size / s / 1e9 for s in took[n]):.3f} GB/s" for n in ("ours", "theirs")]
        ratio = middle([b / a for a, b in zip(took["ours"], took["theirs"])])
    else:
        figures = [f"{statistics.median(took[n]) * 1e6:.0f} µs" for n in ("ours", "theirs")]
        ratio = middle([a / b for a, b in zip(took["ours"], took["theirs"])])
    goal = "" if wanted is None else f", wanted {'at least' if big else 'at most'} {wanted}"
    own = statistics.median(took["own"])
    cpu = f", client's CPU {own * 1e6:.0f} µs" if own and not big else ""
    print(f"{title:36} {figures[0]:>16} {figures[1]:>16}   {ratio[0]:.2f} ± {ratio[1]:.2f}{goal}{cpu}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the drop-in services beside Python servers.")
    parser.add_argument("--program", help="the tensorferry program; it is built without")
    parser.add_argument("--torch", default=sys.executable, help="a Python that has torch and numpy")
    parser.add_argument("--grpc", default=sys.executable, help="a Python of the same version with grpcio-tools")
    parser.add_argument("--go", default="go", help="the go command")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200, help="small calls in a round")
    parser.add_argument("--quick", action="store_true", help="one round of a few calls")
    options = parser.parse_args()
    options.first = 256 << 20
    if options.quick:
        options.rounds, options.calls, options.first = 1, 5, 32 << 20
    asked = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    print(f"commit {commit}, {options.rounds} rounds, medians ± half the distance between the quartiles")
    if subprocess.run([options.torch, "-c", "import torch"], capture_output=True, check=False).returncode:
        print(f"bench: {options.torch} has no torch: nothing to measure")
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
