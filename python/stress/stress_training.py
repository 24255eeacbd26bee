"""Training under stress: faults at random, sessions that vanish, and many steps."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Optional

import torch
from stress import CALL_SECONDS, SLACK, Server, Tally, children, gather, held, kill_own_link, returns, usage

import tensorferry as tf
from tensorferry.torch import RemoteModule, RemoteOptimizer, Rewound

nn, F = torch.nn, torch.nn.functional
STEPS_BETWEEN = 4  # faults, about
CHECKPOINT_EVERY = 5
PAUSE_SECONDS = 0.3  # between two faults, at most


def trunk() -> Any:
    """The model of the server's process: with random numbers, and without what counts its passes."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32))


def flags(folder: Optional[str] = None, lease: str = "30s") -> list[str]:
    kept = f",checkpoint={folder},checkpoint-every={CHECKPOINT_EVERY}" if folder else ""
    return ["--python", f"trunk=stress_training:trunk,train,lease={lease}{kept}", "--python-threads", "1"]


def used(server: Server) -> dict[str, int]:
    """Return what the process of the model uses."""
    (worker,) = children(server.pid)
    return {f"worker's {k}": v for k, v in usage(worker).items()}


def env() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TENSORFERRY_PYTHON": sys.executable}


class Own:
    """The client's side: bottom, top, their optimizer and the data of each step."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.bottom, self.top = nn.Linear(32, 32), nn.Linear(32, 10)
        self.optimizer = torch.optim.Adam([*self.bottom.parameters(), *self.top.parameters()], lr=1e-2)
        self.saved: dict[int, Any] = {}
        self.save(0)

    def save(self, n: int) -> None:
        self.saved[n] = copy.deepcopy([p.state_dict() for p in (self.bottom, self.top, self.optimizer)])

    def back(self, n: int) -> None:
        if n not in self.saved:  # a fused step stands there of which this side has not heard
            return
        for part, state in zip((self.bottom, self.top, self.optimizer), copy.deepcopy(self.saved[n])):
            part.load_state_dict(state)

    def batch(self, n: int) -> tuple[Any, Any]:
        torch.manual_seed(1000 + n)  # for the seeds of the step, too
        return torch.randn(16, 32), torch.randint(10, (16,))

    def loss(self, middle: Any, n: int) -> Any:
        x, y = self.batch(n)
        return F.cross_entropy(self.top(middle(self.bottom(x))), y)


def undisturbed(steps: int) -> list[float]:
    """The losses of the unsplit model."""
    own, middle = Own(), trunk()
    theirs = torch.optim.Adam(middle.parameters(), lr=1e-2)

    def seeded(x: Any) -> Any:
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return middle(x)

    losses = []
    for n in range(steps):
        own.optimizer.zero_grad()
        theirs.zero_grad()
        loss = own.loss(seeded, n)
        loss.backward()
        own.optimizer.step()
        theirs.step()
        losses.append(loss.item())
    return losses


def faults(tally: Tally, n: int, seed: int) -> None:
    """Train while processes are killed and calls are cut, and compare the curve with that of the unsplit model."""
    torch.set_num_threads(1)
    steps = n * STEPS_BETWEEN
    want = undisturbed(steps)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folder = tempfile.TemporaryDirectory()
    server = Server(*flags(folder.name), port=port, env=env())
    rng, over = random.Random(seed), threading.Event()
    at = [0]  # the step that is under way
    own, got = Own(), {}

    def train() -> None:
        client = tf.connect(server.address, retry="exponential", retry_for=30)
        module = RemoteModule(client, "trunk", timeout=CALL_SECONDS, on_rewind=own.back)
        with module.training():
            while True:
                n = at[0] = module.step
                if n not in own.saved:
                    tally.add("rewound")
                    n = (n - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
                    module.rewind(n)
                    own.back(n)
                theirs = RemoteOptimizer(module.parameters(), "adam", lr=1e-2, fused=n % 3 != 0)
                if n >= steps or tally.over.is_set():
                    break
                try:
                    began = time.monotonic()
                    own.optimizer.zero_grad()
                    theirs.zero_grad()
                    loss = own.loss(module, n)
                    loss.backward()
                    own.optimizer.step()
                    own.save(n + 1)
                    theirs.step()
                    if got.setdefault(n, loss.item()) != loss.item():
                        tally.fail(f"step {n} had the loss {got[n]}, and {loss.item()} when it was repeated")
                    tally.add("steps")
                    tally.took("a step", began, 2 * CALL_SECONDS)
                except Rewound as err:
                    tally.add(f"went {'back' if err.step < n else 'on'}")
                except tf.Error as err:
                    tally.add(f"failed with {err.code}")
                    own.back(n)
                tally.tick()
        over.set()
        client.close()

    def disturb() -> None:
        nonlocal server
        for i in range(n):
            while at[0] < max(1, i * STEPS_BETWEEN * 0.8) and not over.is_set() and not tally.over.is_set():
                time.sleep(0.005)
            if over.is_set() or tally.over.is_set():
                break
            time.sleep(rng.uniform(0, 0.02))
            how = rng.choice(("worker killed", "worker killed", "server killed", "server drained", "link killed"))
            tally.add(how)
            if how == "worker killed":
                for pid in children(server.pid):
                    os.kill(pid, signal.SIGKILL)
            elif how == "link killed":
                kill_own_link()
            else:
                server.signal(signal.SIGKILL if how == "server killed" else signal.SIGTERM)
                if server.ended(60) is None:
                    tally.fail("the server does not end: " + "".join(server.log))
                server = Server(*flags(folder.name), port=port, env=env())
            time.sleep(rng.uniform(0, PAUSE_SECONDS))

    gather(tally, [train], disturb)
    if not tally.over.is_set():
        bad = [n for n in range(steps) if got.get(n) != want[n]]
        if bad:
            tally.fail(
                f"{len(bad)} of {steps} losses differ, the first is {got.get(bad[0])} at {bad[0]}, not {want[bad[0]]}"
            )
    server.stop(tally)
    folder.cleanup()


def kept(client: tf.Client) -> dict[str, int]:
    """Return what the model keeps."""
    gauges = next(m for m in client.info()["models"] if m["name"] == "trunk")["gauges"]
    return {name: int(gauges[name]) for name in ("training_graphs", "training_graph_bytes")}


def sessions(tally: Tally, n: int, seed: int) -> None:
    """Clients that keep a graph each, and vanish."""
    server = Server(*flags(lease="100ms"), env=env())
    rng = random.Random(seed)
    with tf.connect(server.address) as first:

        def one() -> None:
            how = rng.choice(("closed", "dropped", "killed") if rng.random() < 0.05 else ("closed", "dropped"))
            tally.add(how)
            if how == "killed":
                child = subprocess.Popen(
                    [sys.executable, __file__, server.address], stdout=subprocess.PIPE, env={**os.environ, **env()}
                )
                assert child.stdout is not None
                child.stdout.readline()
                child.kill()
                child.wait()
                child.stdout.close()
                return
            client = tf.connect(server.address)
            leave(client)
            if how == "closed":
                client.close()

        def now() -> dict[str, int]:
            gc.collect()
            first.compute("trunk", torch.zeros(1, 32))
            return {**used(server), **kept(first), **held(first, server.pid)}

        for _ in range(20):
            one()
        base = now()
        for _ in range(n):
            if tally.over.is_set():
                break
            one()
            tally.tick()
        returns(
            tally, "all", now, {**base, "training_graphs": 0, "training_graph_bytes": 0}, {**SLACK, "worker's MiB": 16}
        )
    server.stop(tally)


def leave(client: tf.Client) -> None:
    """Keep a graph, and go without a word."""
    module = RemoteModule(client, "trunk", timeout=CALL_SECONDS)
    module._token = f"{random.getrandbits(128):x}"
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        try:
            module._take()
            break
        except tf.FailedPrecondition:  # the one before holds the lease for a moment
            if time.monotonic() > deadline:
                raise
            gc.collect()
            time.sleep(0.02)
    call = module._train({"x": torch.randn(1000, 32)}, 1, ["x"])
    call.result()


def steps(tally: Tally, n: int, seed: int) -> None:
    """Many steps, and what all processes use."""
    torch.set_num_threads(1)
    server = Server(*flags(), env=env())
    own = Own()
    with tf.connect(server.address) as client:
        module = RemoteModule(client, "trunk", timeout=CALL_SECONDS)
        theirs = RemoteOptimizer(module.parameters(), "adam", lr=1e-3)

        def now() -> dict[str, int]:
            gc.collect()
            mine = {f"own {k}": v for k, v in usage(os.getpid()).items()}
            return {**mine, **used(server), **kept(client), **held(client, server.pid)}

        with module.training():
            base: dict[str, int] = {}
            for i in range(n):
                if tally.over.is_set():
                    break
                if i == n // 10:
                    base = now()
                own.optimizer.zero_grad()
                own.loss(module, i).backward()
                theirs.step()
                own.optimizer.step()
                tally.add("steps")
                tally.tick()
            slack = {"own MiB": 8, "worker's MiB": 8, "worker_result_bytes": 64 << 10}  # of the last step
            returns(tally, "all", now, base, {**SLACK, **slack})
    server.stop(tally)


if __name__ == "__main__":
    with tf.connect(sys.argv[1]) as c:
        leave(c)
        print("kept", flush=True)
        time.sleep(60)
