"""Measures the training of a torch module of a server: make bench-training.

Client and server are two processes, and torch has one thread in each. Everybody who takes
part works in turns, and a ratio is taken within a round. It prints tables and judges no time;
it fails where the parts have not learned the same. docs/training.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "python" / "src"))
sys.path.append(str(HERE.parent / "python"))
MODULES = os.pathsep.join([str(HERE), *filter(None, sys.path)])
from child import Child  # noqa: E402

BATCH = 64
GOAL = 3.3  # a round of training in small calls: it has three
STEP = 0.4  # seconds of a step that is measured over a road
MICRO = 8
ROAD = "50ms"
NAMES = {
    "alone": "unsplit, in one process",
    "split": "trunk on a server",
    "unwaited": "the same, step(wait=False)",
    "pipeline": f"the same, pipeline(4), {MICRO} micro-batches",
    "rpc": "torch.distributed.rpc",
}


def spread(all: list[float]) -> tuple[float, float]:
    """Return the median, and half the distance between the quartiles."""
    if len(all) < 2:
        return all[0], 0.0
    low, _, high = statistics.quantiles(all, n=4, method="inclusive")
    return statistics.median(all), (high - low) / 2


def line(title: str, all: list[float], unit: str, *more: str) -> None:
    print(f"  {title:44} {'{:10.1f} ± {:.1f}'.format(*spread(all)):20} {unit:9}", *more)


def beside(a: list[float], b: list[float]) -> str:
    return "{:.2f} ± {:.2f}".format(*spread([x / y for x, y in zip(a, b)]))


def measure(options: argparse.Namespace, folder: str) -> None:
    environment = {"PYTHONPATH": MODULES, "TENSORFERRY_BIN": options.program}
    children: list[Child] = []

    def start(*command: object) -> Child:
        children.append(Child(*command, TENSORFERRY_PYTHON=sys.executable, GLOG_minloglevel="1", **environment))
        return children[-1]

    try:
        server = start(
            options.program, "serve", "--child", "--listen", "127.0.0.1:0", "--engine", "cpu", "--python-threads", "1",
            "--python", "change=models:change", "--python", "small=models:small", "--train", "small",
            "--python", "trunk=models:Trunk", "--train", "trunk",
        )  # fmt: skip
        ferry = start(sys.executable, HERE / "ends.py", "ferry", server.hear())
        ferry.hear()
        peer = start(sys.executable, HERE / "ends.py", "rpc-server")
        said = peer.hear()
        rpc, missing = None, ""
        if said.startswith("missing"):
            missing = said
        else:
            rpc = start(sys.executable, HERE / "ends.py", "rpc", said)
            rpc.hear()
        calls_and_rounds(options, ferry)
        throughput(options, ferry, rpc, missing)
        wire(options, ferry)
        where(options, ferry)
    finally:
        for child in reversed(children):
            child.close()


def turns(options: argparse.Namespace, what: str, who: list[tuple[str, Child]], count: int) -> dict[str, list[dict]]:
    """Have everybody do a count of steps in each round, and return what they said of it."""
    said: dict[str, list[dict]] = {name: [] for name, _ in who}
    for i in range(-1, options.rounds):  # the first is to get warm
        print(f"bench: {what}, round {i + 1} of {options.rounds}", file=sys.stderr)
        at = i % len(who)
        for name, child in who[at:] + who[:at]:
            answer = json.loads(child.ask(name, count))
            if i >= 0:
                said[name].append(answer)
    return said


def calls_and_rounds(options: argparse.Namespace, ferry: Child) -> None:
    who = [(name, ferry) for name in ("call", "round", "round-alone", "round-parts")]
    said = turns(options, "calls and rounds", who, options.calls)
    call, whole, alone = ([x["p50"] * 1e6 for x in said[name]] for name, _ in who[:3])
    print("\nsmall call and training round, 30 KB of activations, p50")
    line("call of a --python model that changes its input", call, "µs")
    line("training round: forward, backward, step", whole, "µs", f"{beside(whole, call)} calls, goal {GOAL} or less")
    line("the same without a server", alone, "µs")
    rest = [a - b for a, b in zip(whole, alone)]
    line("difference", rest, "µs", f"{beside(rest, call)} calls")
    for part, title in (("forward", "forward pass"), ("backward", "backward pass"), ("apply", "step")):
        all = [x[part] * 1e6 for x in said["round-parts"]]
        inside = "{:.0f} ± {:.0f}".format(*spread([x[part + " in worker"] * 1e6 for x in said["round-parts"]]))
        line(f"call of the {title}", all, "µs", f"{inside} of them in the worker and its link")


def throughput(options: argparse.Namespace, ferry: Child, rpc: Child | None, missing: str) -> None:
    who = [(name, ferry) for name in ("alone", "split", "unwaited", "pipeline")] + ([("rpc", rpc)] if rpc else [])
    said = turns(options, "throughput", who, options.steps)
    print(f"\ntraining of 784-128-128-128-10, batch of {BATCH}, Adam on all sides")
    rates = {name: [options.steps * BATCH / x["seconds"] for x in all] for name, all in said.items()}
    for name, all in rates.items():
        line(NAMES[name], all, "images/s", "" if name == "alone" else beside(all, rates["alone"]) + " of unsplit")
    if missing:
        print(f"  {NAMES['rpc']}: {missing}")
    for name, all in said.items():  # each begins anew in each round
        most = 0.0 if name in ("split", "unwaited") else 1e-3
        off = max(abs(x["loss"] - y["loss"]) for x, y in zip(all, said["alone"]))
        if off > most:
            sys.exit(f"bench: the last loss of {NAMES[name]} differs by {off} from that of the unsplit network")


def wire(options: argparse.Namespace, ferry: Child) -> None:
    said = json.loads(ferry.ask("wire", options.steps))
    print(f"\nbytes of a step, batch of {BATCH}: activations and gradients, both ways")
    titles = {"least": "the least", "tensors": "tensors, by client.statistics()", "tcp": "TCP payload, by ss"}
    for name, title in titles.items():
        if said[name]:
            print(f"  {title:44} {said[name]:10.0f}            {said[name] / said['least']:.3f}")


def where(options: argparse.Namespace, ferry: Child) -> None:
    said = [json.loads(ferry.ask("where", options.steps)) for _ in range(options.rounds)]
    print(f"\nwhere a step's time goes, batch of {BATCH}, means")
    steps = [x["step"] * 1e6 for x in said]
    for name, title in (
        ("step", "whole step"),
        ("client", "client: bottom, top, loss, their optimizer"),
        ("wire", "between: link, TCP, and what wakes whom"),
        ("receive", "server: receiving"),
        ("queue", "server: waiting for its turn"),
        ("compute", "server: worker and its link"),
        ("rest", "server: the rest"),
    ):
        all = [x[name] * 1e6 for x in said]
        line(title, all, "µs", f"{statistics.median(a / b for a, b in zip(all, steps)):.0%}")


def over_a_road(options: argparse.Namespace, folder: str) -> None:
    """Measure over a link of bench/roads, which the Go program builds: it runs the two ends."""
    program = os.path.join(folder, "road")
    subprocess.run([options.go, "build", "-o", program, "./training/road"], cwd=ROOT / "bench", check=True)
    pause = STEP / MICRO / 4  # a micro-batch pauses twice here, and twice there
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_")}
    said = subprocess.run(
        [program, "-rtt", ROAD, "env", f"TENSORFERRY_PYTHON={sys.executable}", options.program, "serve", "--child",
         "--insecure", "--engine", "cpu", "--python", "trunk=models:Paused", "--python-threads", "1",
         "--train", "trunk", "--python-env", f"PAUSE={pause}", "--", sys.executable, HERE / "ends.py", "road",
         str(options.rounds), str(options.road_steps)],
        env={**clean, "PYTHONPATH": MODULES, "PAUSE": str(pause), "TENSORFERRY_BIN": options.program},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if said.returncode:
        sys.exit(f"bench: the road ended with {said.returncode}")
    print(f"\nover a road of {ROAD} and 1 Gbit/s, {MICRO} micro-batches of 128 KiB, {STEP * 1e3:.0f} ms a step unsplit")
    if not said.stdout.startswith("{"):
        print("  " + said.stdout.strip())
        return
    all = json.loads(said.stdout)
    for name, title in (
        ("alone", "unsplit, here"),
        ("1", "split, pipeline(1)"),
        ("4", "split, pipeline(4)"),
        (str(MICRO), f"split, pipeline({MICRO})"),
        ("unwaited", f"split, pipeline({MICRO}), step(wait=False)"),
    ):
        ms = [x * 1e3 for x in all[name]]
        rate = "" if name == "alone" else beside(all["alone"], all[name]) + " of unsplit's throughput"
        line(title, ms, "ms/step", rate)


def commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def processor() -> str:
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the training of a torch module of a server.")
    parser.add_argument("--quick", action="store_true", help="run everything briefly: the figures mean nothing")
    parser.add_argument("--road", action="store_true", help="measure over a link of 50 ms, too; needs root")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200, help="small calls, or training rounds, of a round")
    parser.add_argument("--steps", type=int, default=40, help="steps of a round")
    parser.add_argument("--program", default=os.environ.get("TENSORFERRY_BIN"), help="instead of this tree's")
    parser.add_argument("--go", default=os.environ.get("GO", "go"), help="the go command")
    options = parser.parse_args()
    options.road_steps = 4
    if options.quick:
        options.rounds, options.calls, options.steps, options.road_steps = 1, 20, 4, 1
    if min(options.rounds, options.calls, options.steps) < 1:
        parser.error("rounds, calls and steps are 1 or more")
    try:
        import torch
    except ImportError as err:
        print(f"nothing was measured: {err}")
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        if not options.program:
            options.program = os.path.join(folder, "tensorferry")
            subprocess.run([options.go, "build", "-o", options.program, "./cmd/tensorferry"], cwd=ROOT, check=True)
        options.program = shutil.which(os.path.abspath(options.program)) or options.program
        begin = time.monotonic()
        print(f"{processor()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f} · {time.strftime('%Y-%m-%d')}")
        print(f"commit {commit()}, python {platform.python_version()}, torch {torch.__version__}, one thread a process")
        print(f"{options.rounds} rounds in turns: medians ± half the distance between the quartiles")
        measure(options, folder)
        if options.road:
            over_a_road(options, folder)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end, after {time.monotonic() - begin:.0f} s")
    if options.quick:
        print("--quick: the figures mean nothing")


if __name__ == "__main__":
    main()
