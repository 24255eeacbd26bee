"""Measures the training of a torch module of a server: make bench-training.

Client and server are two processes, and torch has one thread in each. Everybody who takes
part works in turns, and a ratio is taken within a round. It prints tables and judges no time;
it fails where the parts have not learned the same. docs/training.md says more.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "python"))
import common  # noqa: E402
from common import ROOT, Child, Children, beside, line, spread, turns  # noqa: E402

sys.path.insert(0, str(ROOT / "python" / "src"))
MODULES = os.pathsep.join([str(HERE), *filter(None, sys.path)])

BATCH = 64
GOAL, GOAL_FUSED = 3.3, 2.3  # small calls that a round of three calls, or of two, takes beyond one without a server
STEP = 0.4  # seconds of a step that is measured over a road
MICRO, ROAD_MICRO = 4, 8
ROAD = "50ms"
NAMES = {
    "alone": "unsplit, in one process",
    "split": "trunk on a server",
    "unwaited": "the same, step(wait=False)",
    "fused": "the same, fused",
    "alone-micro": f"unsplit, {MICRO} micro-batches",
    "pipeline": f"trunk on a server, pipeline(4), {MICRO} micro-batches",
    "rpc": "torch.distributed.rpc",
}


def measure(options: argparse.Namespace) -> None:
    environment = {"PYTHONPATH": MODULES, "TENSORFERRY_BIN": options.program, "GLOG_minloglevel": "1"}
    ends = HERE / "ends.py"
    with Children() as children:
        server = children.serve(
            options.program, "--python-threads", "1", "--python", "change=models:change",
            "--python", "small=models:small,train", "--python", "trunk=models:Trunk,train",
            **environment,
        )  # fmt: skip
        ferry = children.start(sys.executable, ends, "ferry", server, **environment)
        said = children.start(sys.executable, ends, "rpc-server", **environment).said
        rpc = None if said.startswith("missing") else children.start(sys.executable, ends, "rpc", said, **environment)
        calls_and_rounds(options, ferry)
        throughput(options, ferry, rpc, said)
        wire(options, ferry)
        where(options, ferry)


def steps(ferry: Child, names: tuple[str, ...], count: int) -> dict:
    """Return who takes a count of steps in each round."""
    return {name: functools.partial(ferry.ask, name, count) for name in names}


def calls_and_rounds(options: argparse.Namespace, ferry: Child) -> None:
    who = ("call", "round", "round-fused", "round-alone", "round-parts")
    said = turns("calls and rounds", options.rounds, steps(ferry, who, options.calls))
    call, whole, fused, alone = ([x["p50"] * 1e6 for x in said[name]] for name in who[:4])
    print("\nsmall call and training round, 30 KB of activations, p50")
    line("call of a --python model that changes its input", call, "µs")
    line("the round without a server", alone, "µs")
    for title, took, goal in (
        ("training round: forward, backward, step", whole, GOAL), ("the same, fused: two calls", fused, GOAL_FUSED)
    ):  # fmt: skip
        line(title, took, "µs")
        rest = [a - b for a, b in zip(took, alone)]
        line("  beyond the round without a server", rest, "µs", f"{beside(rest, call)} calls, goal {goal} or less")
    for part, title in (("forward", "forward pass"), ("backward", "backward pass"), ("step", "step")):
        all = [x[part] * 1e6 for x in said["round-parts"]]
        inside = "{:.0f} ± {:.0f}".format(*spread([x[part + " in worker"] * 1e6 for x in said["round-parts"]]))
        line(f"call of the {title}", all, "µs", f"{inside} of them in the worker and its link")


def throughput(options: argparse.Namespace, ferry: Child, rpc: Child | None, rpc_said: str) -> None:
    who = steps(ferry, ("alone", "split", "unwaited", "fused", "alone-micro", "pipeline"), options.steps)
    if rpc:
        who |= steps(rpc, ("rpc",), options.steps)
    said = turns("throughput", options.rounds, who)
    print(f"\ntraining of 784-128-128-128-10, batch of {BATCH}, Adam on all sides")
    rates = {name: [options.steps * BATCH / x["seconds"] for x in all] for name, all in said.items()}
    for name, all in rates.items():
        of = {"fused": ("rpc", "alone"), "pipeline": ("alone-micro",), "alone": ()}.get(name, ("alone",))
        line(NAMES[name], all, "images/s", ", ".join(f"{beside(all, rates[n])} of {n}" for n in of if n in rates))
    if not rpc:
        print(f"  {NAMES['rpc']}: {rpc_said}")
    for name, all in said.items():  # each begins anew in each round
        most = 0.0 if name in ("split", "unwaited", "fused") else 1e-3
        off = max(abs(x["loss"] - y["loss"]) for x, y in zip(all, said["alone"]))
        if off > most:
            sys.exit(f"bench: the last loss of {NAMES[name]} differs by {off} from that of the unsplit network")


def wire(options: argparse.Namespace, ferry: Child) -> None:
    said = ferry.ask("wire", options.steps)
    print(f"\nbytes of a step, batch of {BATCH}: activations and gradients, both ways")
    titles = {"least": "the least", "tensors": "tensors, by client.statistics()", "tcp": "TCP payload, by ss"}
    for name, title in titles.items():
        if said[name]:
            print(f"  {title:44} {said[name]:10.0f}            {said[name] / said['least']:.3f}")


def where(options: argparse.Namespace, ferry: Child) -> None:
    said = [ferry.ask("where", options.steps) for _ in range(options.rounds)]
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
    program = common.build(options.go, "./roads", folder)
    pause = STEP / ROAD_MICRO / 4  # a micro-batch pauses twice here, and twice there
    said = subprocess.run(
        [program, "-links", f"{ROAD}:9000:1000:0", "env", f"TENSORFERRY_PYTHON={sys.executable}", options.program,
         "serve", "--child", "--insecure", "--engine", "cpu", "--python", "trunk=models:Paused,train",
         "--python-threads", "1", "--python-env", f"PAUSE={pause}", "--", sys.executable, HERE / "ends.py", "road",
         str(options.rounds), str(options.road_steps)],
        env={**common.clean(), "PYTHONPATH": MODULES, "PAUSE": str(pause), "TENSORFERRY_BIN": options.program},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if said.returncode:
        sys.exit(f"bench: the road ended with {said.returncode}")
    print(
        f"\nover a road of {ROAD} and 1 Gbit/s, {ROAD_MICRO} micro-batches of 128 KiB, {STEP * 1e3:.0f} ms a step alone"
    )
    if not said.stdout.startswith("{"):
        print("  " + said.stdout.strip())
        return
    all = json.loads(said.stdout)
    for name, title in (
        ("alone", "unsplit, here"),
        ("1", "split, pipeline(1)"),
        ("4", "split, pipeline(4)"),
        (str(ROAD_MICRO), f"split, pipeline({ROAD_MICRO})"),
        ("unwaited", f"split, pipeline({ROAD_MICRO}), step(wait=False)"),
    ):
        ms = [x * 1e3 for x in all[name]]
        rate = "" if name == "alone" else beside(all["alone"], all[name]) + " of unsplit's throughput"
        line(title, ms, "ms/step", rate)


def main() -> None:
    parser = common.options("Measure the training of a torch module of a server.", 7)
    parser.add_argument("--road", action="store_true", help="measure over a link of 50 ms, too; needs root")
    parser.add_argument("--calls", type=int, default=200, help="small calls, or training rounds, of a round")
    parser.add_argument("--steps", type=int, default=40, help="steps of a round")
    options = parser.parse_args()
    options.road_steps = 4
    if options.quick:
        options.rounds, options.calls, options.steps, options.road_steps = 1, 20, 4, 1
    if min(options.calls, options.steps) < 1:
        parser.error("calls and steps are 1 or more")
    try:
        import torch
    except ImportError as err:
        print(f"nothing was measured: {err}")
        return
    with common.measuring(options, f", torch {torch.__version__}, one thread a process") as folder:
        measure(options)
        if options.road:
            over_a_road(options, folder)


if __name__ == "__main__":
    main()
