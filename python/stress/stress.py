#!/usr/bin/env python3
"""Puts the Python side of tensorferry under stress: processes killed at random moments, forks, threads.

    stress.py worker-kills|client-kills|program-kills|threads|tasks|training-faults|training-sessions|training-steps

Each command prints a line now and then and a summary, and exits with 1 if something went wrong. It needs nothing but
the package and the program ($TENSORFERRY_BIN); numpy and torch are used where they are. It reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import faulthandler
import functools
import gc
import itertools
import os
import pathlib
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Callable, Optional

HERE = pathlib.Path(__file__).resolve().parent
try:
    import tensorferry as tf
except ImportError:  # not installed: from the working tree
    sys.path.insert(0, str(HERE.parent / "src"))
    import tensorferry as tf

from stress_models import LOAD_SECONDS  # noqa: E402

from tensorferry import _program  # noqa: E402

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

MIB = 1 << 20
SIZES = (0, 1, 30_000, MIB + 1, 12 * MIB)
BLOCK = random.Random(7).randbytes(13 * MIB)  # all content is a part of it
CALL_SECONDS = 60.0  # the limit of a call that shall not need one
STUCK_SECONDS = 90.0  # without any progress all stacks are dumped
BACK_SECONDS = 180.0  # how long memory and descriptors may take to return: Go collects an idle heap every two minutes
MARK = "FERRY_STRESS"  # variable by which processes that this one started are found


# What happened.


class Tally:
    """Counts what happened, by name, and keeps what went wrong. It is for any thread."""

    def __init__(self, name: str):
        self.name = name
        self.counts: collections.Counter[str] = collections.Counter()
        self.longest: dict[str, float] = {}
        self.wrong: list[str] = []
        self.over = threading.Event()  # something went wrong: end soon
        self._lock = threading.Lock()
        self._began = self._said = time.monotonic()
        self._seen = -1
        self.tick()

    def add(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n

    def took(self, what: str, since: float, most: float) -> None:
        """Note how long something took, which is wrong if it is more than most."""
        seconds = time.monotonic() - since
        with self._lock:
            self.longest[what] = max(seconds, self.longest.get(what, 0.0))
        if seconds > most:
            self.fail(f"{what} took {seconds:.1f} s, more than {most} s")

    def fail(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)
        print(f"{self.name}: WRONG: {what}", file=sys.stderr, flush=True)
        self.over.set()

    def tick(self) -> None:
        """Print a line now and then, and put the watchdog off where there was progress."""
        now = time.monotonic()
        total = sum(self.counts.values())
        if total != self._seen:
            self._seen = total
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        if now - self._said >= 10:
            self._said = now
            print(self, flush=True)

    def __str__(self) -> str:
        counts = [f"{n} {what}" for what, n in sorted(self.counts.items())]
        longest = [f"{what} {s:.2f} s at most" for what, s in sorted(self.longest.items())]
        return f"{self.name}: {time.monotonic() - self._began:.0f} s: " + ", ".join(counts + longest)

    def end(self) -> int:
        faulthandler.cancel_dump_traceback_later()
        print(self, flush=True)
        print(f"{self.name}: " + (f"{len(self.wrong)} things went wrong" if self.wrong else "ok"), flush=True)
        return 1 if self.wrong else 0


def gather(tally: Tally, jobs: list[Callable[[], None]], meanwhile: Optional[Callable[[], None]] = None) -> None:
    """Run jobs on threads of their own, and something on this one, to the end."""

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException:
            tally.fail(traceback.format_exc())

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for t in threads:
        t.start()
    if meanwhile is not None:
        guarded(meanwhile)
    for t in threads:
        while t.is_alive():
            t.join(0.5)
            tally.tick()


def share(tally: Tally, rounds: Iterator[int], most: int, works: list[Callable[[int], None]]) -> None:
    """Have threads, one for each work, do rounds up to a number."""

    def job(work: Callable[[int], None]) -> None:
        while (k := next(rounds)) < most and not tally.over.is_set():
            work(k)

    gather(tally, [functools.partial(job, work) for work in works])


def until(claim: Callable[[], Any], seconds: float, pause: float = 0.02) -> Any:
    """Look at what nobody tells of until it holds, and return it; the last look after some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        holds = claim()
        if holds or time.monotonic() >= deadline:
            return holds
        time.sleep(pause)


# Processes.


class Process:
    """A process that is found by its number, whose number may be another's as soon as it has ended."""

    def __init__(self, pid: int):
        self.pid = pid
        self.fd = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def ended(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""  # it has ended


def processes() -> Iterator[tuple[int, int, str]]:
    """Yield the numbers of all processes, their parents' and their states."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if fields:
                yield int(name), int(fields[1]), fields[0].decode()


def children(pid: int) -> list[int]:
    return [child for child, parent, _ in processes() if parent == pid]


def arguments(pid: int) -> list[str]:
    return read(f"/proc/{pid}/cmdline").decode().split("\0")[:-1]


def marked(mark: str) -> list[int]:
    """Return the living processes that have a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    return [
        pid for pid, _, state in processes() if state != "Z" and wanted in read(f"/proc/{pid}/environ").split(b"\0")
    ]


def links(mark: str) -> list[int]:
    return [pid for pid in marked(mark) if arguments(pid)[1:2] == ["link"]]


def own_link() -> int:
    """Return the link program of this process. Another thread may be about to start it."""
    return int(until(lambda: [p for p in children(os.getpid()) if arguments(p)[1:2] == ["link"]], 10)[0])


def kill_own_link() -> None:
    with Process(own_link()) as program:
        program.kill()
        if not program.ended(10):
            raise RuntimeError("a program that was killed does not end")


def usage(pid: int) -> dict[str, int]:
    """Return the descriptors, mappings of shared memory, threads and resident bytes of a process."""
    status = dict(re.findall(r"^(RssAnon|RssShmem|Threads):\s+(\d+)", read(f"/proc/{pid}/status").decode(), re.M))
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": read(f"/proc/{pid}/maps").count(b"memfd:"),
        "threads": int(status["Threads"]),
        "MiB": (int(status["RssAnon"]) + int(status["RssShmem"])) >> 10,
        "children": len(children(pid)),
    }


def returns(
    tally: Tally, what: str, now: Callable[[], dict[str, int]], base: dict[str, int], slack: dict[str, int]
) -> None:
    """Check that all numbers come back to what they were, but for a slack."""

    rest: list[str] = []  # of the last look

    def back() -> bool:
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        rest[:] = [f"{k} {base[k]} -> {n}" for k, n in now().items() if n > base[k] + slack.get(k, 0)]
        return not rest

    began = time.monotonic()
    if not until(back, BACK_SECONDS, 0.2):
        tally.fail(f"{what} does not return to its baseline: {rest}; of {base}")
    tally.took(f"return of {what}", began, BACK_SECONDS + 5)


class Server:
    """A server in a process of its own."""

    def __init__(self, *flags: str, port: int = 0, env: Optional[dict[str, str]] = None):
        self.process = subprocess.Popen(
            [_program.find(), "serve", "--child", "--listen", f"127.0.0.1:{port}", "--engine", "cpu", "--slow", *flags],
            stdin=subprocess.PIPE,  # whose end is the server's, if this process is killed
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # serve takes variables of this prefix for its settings.
            env={**{k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_")}, **(env or {})},
        )
        self.pid = self.process.pid
        self.log: collections.deque[str] = collections.deque(maxlen=200)
        assert self.process.stdout is not None and self.process.stderr is not None
        self._reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            self._reader.join(5)
            raise RuntimeError("the server did not start: " + "".join(self.log))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float) -> Optional[int]:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, tally: Tally) -> None:
        self.signal(signal.SIGTERM)
        code = self.ended(30)
        if code is None:
            tally.fail("the server does not end 30 s after SIGTERM")
            self.process.kill()
            self.process.wait()
        elif code:
            tally.fail(f"the server ended with {code}: " + "".join(list(self.log)[-20:]))
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        if any("panic" in line or "DATA RACE" in line for line in self.log):
            tally.fail("the server's log has a panic: " + "".join(self.log))


def held(client: tf.Client, pid: int) -> dict[str, int]:
    """Return what a server holds: its own counters and what the system says."""
    info = client.info()
    counters = info["counters"]
    used = {k: counters[k] for k in ("calls", "sessions", "open_transfers", "panics_total")}
    used["memory KiB"] = counters["memory_used_bytes"] >> 10
    for model in info["models"]:
        for name in ("worker_input_bytes", "worker_result_bytes", "worker_queue_blocks"):
            used[name] = used.get(name, 0) + int(model.get("gauges", {}).get(name, 0))
    rest = usage(pid)
    rest["MiB"] -= min(rest["MiB"], counters["memory_kept_bytes"] >> 20)  # kept for the next call, up to a limit
    return {**used, **rest}


# Of a server and of a link program: the runtime keeps some memory and threads.
SLACK = {"descriptors": 2, "threads": 8, "MiB": 128, "mappings": 4, "memory KiB": 8 << 10, "sessions": 1}


# Content.


def content(rng: random.Random, sizes: Any = SIZES) -> bytes:
    size = rng.choice(sizes)
    at = rng.randrange(len(BLOCK) - size)
    return BLOCK[at : at + size]


def as_input(rng: random.Random, data: bytes) -> Any:
    if numpy is None or rng.random() < 0.5:
        return data
    return numpy.frombuffer(data, "uint8")


def check(y: Any, data: bytes) -> None:
    got = bytes(y.data) if isinstance(y, tf.Tensor) else bytes(y.tobytes())
    if got != data:
        first = next((i for i, (a, b) in enumerate(zip(got, data)) if a != b), min(len(got), len(data)))
        raise AssertionError(f"{len(got)} bytes differ from the {len(data)} that were expected at {first}")


def items(data: bytes, size: int = 300_000) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


def outcome(tally: Tally, work: Callable[[], Any], *, typed: type[tf.Error] = tf.Unavailable) -> Optional[tf.Error]:
    """Do some work that may fail with one error, and return that. Any other is wrong."""
    try:
        work()
        tally.add("correct")
        return None
    except tf.Error as err:
        if not isinstance(err, typed) or (isinstance(err, tf.LinkError) and typed is not tf.LinkError):
            tally.fail(f"{type(err).__name__} is not {typed.__name__}:\n{traceback.format_exc()}")
        elif not err.retryable or not err.message:
            tally.fail(f"an error without a message, or that is not retryable: {err!r}")
        tally.add(f"{type(err).__name__}s")
        return err
    except Exception:
        tally.fail(traceback.format_exc())
        return None


def again(
    tally: Tally, work: Callable[[], Any], what: str, most: float, typed: type[tf.Error] = tf.Unavailable
) -> None:
    """Try until it works, which shall not take long."""
    began = time.monotonic()
    while not tally.over.is_set():
        err = outcome(tally, work, typed=typed)
        if err is None or time.monotonic() - began > most:
            break
        tally.over.wait(err.retry_after or 0.05)
    tally.took(what, began, most)


# The commands.


class WorkerKills:
    """One model of a server with Python workers, whose process is killed again and again."""

    RECOVERY_SECONDS = 25.0  # the server waits up to 10 s between starts
    ERROR_SECONDS = 10.0

    def __init__(self, tally: Tally, server: Server, client: tf.Client, name: str, rng: random.Random):
        self.tally, self.server, self.client, self.name, self.rng = tally, server, client, name, rng
        self.killed = 0.0  # when

    def worker(self, seconds: float) -> Optional[Process]:
        """Return the process that computes the model; it may be loading."""

        def look() -> Optional[Process]:
            for pid in children(self.server.pid):
                if arguments(pid)[-1:] == [f"stress_models:{self.name}"]:
                    with contextlib.suppress(ProcessLookupError):
                        return Process(pid)
            return None

        found: Optional[Process] = until(look, seconds)
        if found is None:
            self.tally.fail(f"{self.name}: no worker process for {seconds} s")
        return found

    def kill(self, victim: Process, how: str) -> None:
        self.killed = time.monotonic()
        victim.kill()
        self.tally.add(f"killed {how}")

    def start(self, data: bytes, delay: float = 0.0, source: Any = None) -> tf.Call:
        params = {"delay": delay, "copy": str(self.rng.random() < 0.5).lower()}
        x = tf.Tensor(data) if source is None else tf.Stream(source, (len(data),), "uint8")
        return self.client.call(self.name, {"x": x}, params=params, timeout=CALL_SECONDS, like="tensor")

    def finish(self, call: tf.Call, data: bytes) -> None:
        """Wait for a call that may fail, and see that it fails once and for good."""
        err = outcome(self.tally, lambda: check(call.result()["y"], data))
        if self.killed:
            self.tally.took("error or result after a kill", max(self.killed, self.began), self.ERROR_SECONDS)
        if err is not None:
            try:
                call.result()
                self.tally.fail("a call that has failed has a result")
            except tf.Error as second:
                if type(second) is not type(err):
                    self.tally.fail(f"a call failed with {err!r} and then {second!r}")

    def round(self, _: int) -> None:
        victim = self.worker(15)
        if victim is None:
            return
        self.killed, self.began = 0.0, time.monotonic()
        with victim:
            getattr(self, self.rng.choice(("loading", "computing", "filled", "being_read", "at_any_time")))(victim)
        data = content(self.rng)
        again(self.tally, lambda: check(self.start(data).result()["y"], data), "recovery", self.RECOVERY_SECONDS)

    def rest(self) -> None:
        """Begin with a new worker."""
        victim = self.worker(15)
        if victim is not None:
            with victim:
                victim.kill()
                victim.ended(10)
            data = BLOCK[: 12 * MIB]  # results lie in the input: a worker keeps none
            work = lambda: check(self.client.compute(self.name, data, timeout=CALL_SECONDS), data)  # noqa: E731
            again(self.tally, work, "recovery", self.RECOVERY_SECONDS)

    def loading(self, victim: Process) -> None:
        self.kill(victim, "idle")
        victim.ended(10)
        successor = self.worker(15)
        if successor is None:
            return
        with successor:
            self.tally.over.wait(self.rng.uniform(0, LOAD_SECONDS * 1.2))
            self.kill(successor, "loading")
            self.began = time.monotonic()
            data = content(self.rng)
            outcome(self.tally, lambda: check(self.start(data).result()["y"], data))
            self.tally.took("error or result after a kill", self.began, self.ERROR_SECONDS)

    def computing(self, victim: Process) -> None:
        timer = threading.Timer(self.rng.uniform(0, 0.3), self.kill, (victim, "computing"))
        timer.start()
        all = [content(self.rng, SIZES[1:]) for _ in range(self.rng.randint(1, 3))]
        calls = [(self.start(data, 0.03), data) for data in all]
        for call, data in calls:
            self.finish(call, data)
        timer.join()

    def filled(self, victim: Process) -> None:
        data = content(self.rng, SIZES[3:])
        at = self.rng.randrange(len(data) // 300_000 + 1)

        def source() -> Iterator[bytes]:
            for i, item in enumerate(items(data)):
                if i == at:
                    self.kill(victim, "being filled")
                    victim.ended(10)  # the input pauses
                yield item

        self.finish(self.start(data, source=source()), data)

    def being_read(self, victim: Process) -> None:
        data = content(self.rng, SIZES[3:])
        call = self.start(data, 0.005)
        after = self.rng.randint(0, 3)

        def regions() -> None:
            for i, region in enumerate(call.regions()):
                assert region.data is None or bytes(region.data) == data[region.offset :][: region.length]
                if i == after:
                    self.kill(victim, "being read")
            if not self.killed:
                self.kill(victim, "after being read")

        outcome(self.tally, regions)
        self.finish(call, data)
        if not self.killed:
            self.kill(victim, "before being read")

    def at_any_time(self, victim: Process) -> None:
        timer = threading.Timer(self.rng.uniform(0, 0.1), self.kill, (victim, "at any time"))
        timer.start()
        while timer.is_alive():
            data = content(self.rng)
            self.finish(self.start(data), data)
        timer.join()


def worker_kills(tally: Tally, n: int, seed: int) -> None:
    # Each model has its own pauses between starts, which grow: several wait side by side.
    names = [f"{('quick', 'slow')[i % 2]}{i}" for i in range(max(2, min(12, n // 3)))]
    path = os.pathsep.join([str(HERE), os.path.dirname(os.path.dirname(tf.__file__))])
    server = Server(
        *[flag for name in names for flag in ("--python", f"{name}=stress_models:{name}")],
        "--python-env", f"PYTHONPATH={path}",
        env={"TENSORFERRY_PYTHON": sys.executable},
    )  # fmt: skip
    client = tf.connect(server.address)
    rounds = itertools.count()
    models = [WorkerKills(tally, server, client, name, random.Random(f"{seed}/{name}")) for name in names]

    def rest() -> None:
        # New workers keep what they need for one call.
        gather(tally, [model.rest for model in models])
        gc.collect()

    rest()
    base = held(client, server.pid)
    share(tally, rounds, n, [model.round for model in models])
    rest()
    # Each model's pool has memory by size, of nine that its calls have.
    slack = {"descriptors": 12 * len(names), "mappings": 12 * len(names)}
    returns(tally, "the server", lambda: held(client, server.pid), base, {**SLACK, **slack})
    client.close()
    server.stop(tally)


def guest(address: str, seed: str) -> None:
    """Work at random until somebody kills this process."""
    print("begins", flush=True)
    client = tf.connect(address)
    print("connected", flush=True)

    def work(i: int) -> None:
        rng = random.Random(f"{seed}/{i}")
        kept: collections.deque[tuple[Any, bytes]] = collections.deque(maxlen=4)
        while True:
            act(rng, client, kept, f"g{rng.randrange(8)}")

    tally = Tally("guest")
    gather(tally, [functools.partial(work, i) for i in range(3)], lambda: (tally.over.wait(), os._exit(3))[0])


def act(rng: random.Random, client: tf.Client, kept: collections.deque[tuple[Any, bytes]], name: str) -> str:
    """Do one thing of many with a client, check it, and say what it was."""
    data = content(rng)
    what = rng.choice(("compute", "compute", "slow", "stream", "regions", "dropped", "push", "pull", "empty", "out"))
    if what == "compute":
        y = client.compute("echo", as_input(rng, data), timeout=CALL_SECONDS)
        check(y, data)
        kept.append((y, data))  # results that are held stay as they are
        check(*kept[0])
    elif what == "slow":
        call = client.call("slow", {"x": as_input(rng, data)}, params={"delay": "20ms"}, timeout=CALL_SECONDS)
        check(call.result()["y"], data)
    elif what == "stream":
        call = client.call("echo", {"x": tf.Stream(items(data), (len(data),), "uint8")}, timeout=CALL_SECONDS)
        check(call.result()["y"], data)
    elif what == "regions":
        call = client.call("echo", {"x": data}, timeout=CALL_SECONDS, like="tensor")
        arrived = 0
        for region in call.regions():
            if bytes(region.data or b"") != data[region.offset :][: region.length]:
                raise AssertionError("a region has not the bytes that were sent")
            arrived += region.length
        if arrived != len(data):
            raise AssertionError(f"{arrived} bytes of {len(data)} arrived")
    elif what == "dropped":
        call = client.call("slow", {"x": data}, params={"delay": "50ms"}, timeout=CALL_SECONDS)
        next(call.regions(), None)
        del call
    elif what == "push":
        # What is stored says itself what it has to be.
        client.push({f"{name}/{len(data)}": BLOCK[: len(data)]}, timeout=CALL_SECONDS)
    elif what == "pull":
        with contextlib.suppress(tf.NotFound):
            for found, y in client.pull(f"{name}/{len(data)}", timeout=CALL_SECONDS).items():
                check(y, BLOCK[: int(found.rpartition("/")[2])])
    elif what == "empty":
        e = client.empty(len(data), "uint8", like="tensor")
        e.data[:] = data
        check(client.compute("echo", e, timeout=CALL_SECONDS), data)
    elif what == "out":
        out = bytearray(len(data))
        client.compute("echo", data, out=out, timeout=CALL_SECONDS)
        if out != data:
            raise AssertionError("out has not the bytes that were sent")
    return what


def clear(client: tf.Client) -> None:
    """Remove what was pushed."""
    names = [stored.name for stored in client.list()]
    if names:
        client.delete(*names)


def begin(command: str, *args: str, mark: str, **more: Any) -> subprocess.Popen[str]:
    """Start this program with a hidden command."""
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, MARK: mark, **more.pop("env", {})}
    own = [sys.executable, __file__, command, *args]
    return subprocess.Popen(own, stdout=subprocess.PIPE, text=True, env=env, **more)


def client_kills(tally: Tally, n: int, seed: int) -> None:
    server = Server()
    client = tf.connect(server.address)
    rounds = itertools.count(-4)
    shm = set(os.listdir("/dev/shm"))

    def clean() -> None:
        clear(client)
        client.compute("echo", BLOCK, timeout=CALL_SECONDS)

    with tempfile.TemporaryDirectory() as temporary:

        def round(rng: random.Random, k: int) -> None:
            mark = uuid.uuid4().hex
            begun = begin("_guest", server.address, f"{seed}/{k}", mark=mark, env={"TMPDIR": temporary})
            with begun as child:
                at = rng.choice(("at its start", "connecting", "at work", "at work", "at work"))
                if at != "at its start":
                    child.stdout.readline()
                if at == "at work":
                    child.stdout.readline()
                tally.over.wait(rng.uniform(0, {"at its start": 0.3, "connecting": 0.1}.get(at, 1.0)))
                for pid in marked(mark):
                    for fd in range(3, 40):
                        place = ""
                        with contextlib.suppress(OSError):
                            place = os.readlink(f"/proc/{pid}/fd/{fd}")
                        source = place.startswith(f"{HERE.parent}/")  # while it is read
                        if place.startswith(("/tmp/", "/dev/shm/", temporary)) and not source:
                            tally.fail(f"{arguments(pid)} has {place} open")
                code = child.poll()
                if code is not None:
                    tally.fail(f"the client ended with {code} before it was killed")
                child.kill()
                child.wait()
                killed = time.monotonic()
                if not until(lambda: not marked(mark), 15):
                    tally.fail(f"these live after their client: {[(p, arguments(p)) for p in marked(mark)]}")
                tally.took("end of the program", killed, 10)
                tally.add(f"killed {at}")

        works = [functools.partial(round, random.Random(f"{seed}/{i}")) for i in range(4)]
        share(tally, rounds, -2, works[:2])  # the server has its memory
        clean()
        base = held(client, server.pid)
        share(tally, rounds, n, works)
        left = os.listdir(temporary) + sorted(set(os.listdir("/dev/shm")) - shm)
        if left:
            tally.fail(f"left behind: {left}")
    clean()
    returns(tally, "the server", lambda: held(client, server.pid), base, SLACK)
    client.close()
    server.stop(tally)


def program_kills(tally: Tally, n: int, seed: int) -> None:
    server = Server()
    client = tf.connect(server.address)
    rng = random.Random(seed)

    def rest() -> dict[str, int]:
        kill_own_link()  # a new one has little memory, and what stays was leaked
        gc.collect()
        again(tally, lambda: check(client.compute("echo", BLOCK[:MIB]), BLOCK[:MIB]), "recovery", 15, tf.LinkError)
        used = usage(os.getpid())
        del used["MiB"]  # Python keeps what it likes
        return used

    check(client.compute("echo", BLOCK), BLOCK)
    base, served = rest(), held(client, server.pid)
    kept: list[collections.deque[tuple[Any, bytes]]] = [collections.deque(maxlen=3) for _ in range(4)]
    for _ in range(n):
        if tally.over.is_set():
            break
        stop = threading.Event()

        def work(i: int, stop: threading.Event, seed: float) -> None:
            own = random.Random(seed)

            def one() -> None:
                if kept[i] and own.random() < 0.2:  # also what the dead program made is an input
                    y, data = kept[i][-1]
                    check(client.compute("echo", y, timeout=CALL_SECONDS), data)
                else:
                    act(own, client, kept[i], "p")

            while not stop.is_set() and not tally.over.is_set():
                if outcome(tally, one, typed=tf.LinkError) is not None:
                    again(tally, one, "recovery", 15, tf.LinkError)

        def kill(stop: threading.Event = stop) -> None:
            for _ in range(rng.choice((1, 1, 2))):
                tally.over.wait(rng.uniform(0, 0.3))
                kill_own_link()
                tally.add("kills")
            stop.set()

        gather(tally, [functools.partial(work, i, stop, rng.random()) for i in range(len(kept))], kill)
        for results in kept:
            while results:
                check(*results.popleft())
        again(tally, lambda: check(client.compute("echo", BLOCK), BLOCK), "recovery", 15, tf.LinkError)
    again(tally, lambda: clear(client), "recovery", 15, tf.LinkError)
    returns(tally, "this process", rest, base, {"descriptors": 0, "mappings": 2})
    returns(tally, "the server", lambda: held(client, server.pid), served, SLACK)
    client.close()
    server.stop(tally)


def threads(tally: Tally, seconds: float, seed: int) -> None:
    server = Server()
    client = tf.connect(server.address)
    mark = os.environ[MARK] = uuid.uuid4().hex
    kill_own_link()  # the next has the mark
    again(tally, lambda: client.compute("echo", b"1"), "start", 10, tf.LinkError)
    rng, deadline = random.Random(seed), time.monotonic() + seconds
    alive = [time.monotonic()] * 40
    link = own_link()

    def work(i: int) -> None:
        own = random.Random(f"{seed}/{i}")
        kept: collections.deque[tuple[Any, bytes]] = collections.deque(maxlen=2)
        while time.monotonic() < deadline and not tally.over.is_set():
            tally.add(act(own, client, kept, f"t{i}"))
            alive[i] = time.monotonic()
            if own.random() < 0.02:
                gc.collect()

    def middle() -> None:
        things: list[Callable[[], None]] = [
            lambda: fork(tally, client, rng),
            lambda: fork(tally, client, rng),
            lambda: dead_parent(tally, server, mark),
        ]
        with contextlib.suppress(ImportError):
            import torch

            things.append(lambda: loader(tally, client, torch))
        for thing in itertools.cycle(things):
            if time.monotonic() >= deadline or tally.over.is_set():
                break
            thing()
            tally.tick()
            late = [i for i, at in enumerate(alive) if time.monotonic() - at > STUCK_SECONDS]
            if late:
                faulthandler.dump_traceback(all_threads=True)
                tally.fail(f"threads {late} are stuck for {STUCK_SECONDS} s")

    gather(tally, [functools.partial(work, i) for i in range(len(alive))], middle)
    if own_link() != link:
        tally.fail("the link program is another one")
    if not until(lambda: links(mark) == [link], 15):
        tally.fail(f"link programs live on: {links(mark)}, ours is {link}")
    clear(client)
    check(client.compute("echo", BLOCK), BLOCK)
    client.close()
    server.stop(tally)


def fork(tally: Tally, client: tf.Client, rng: random.Random) -> None:
    """Fork some children that use the client."""
    pids = []
    for seed in [rng.random() for _ in range(2)]:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(60)  # the watchdog is a thread, which a child does not have
                own = random.Random(seed)
                kept: collections.deque[tuple[Any, bytes]] = collections.deque(maxlen=2)
                for i in range(5):
                    act(own, client, kept, f"f{i}")
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        pids.append(pid)
    for pid in pids:
        status = os.waitpid(pid, 0)[1]
        if status:
            tally.fail(f"a forked child ended with status {status}")
        tally.add("forks")


def loader(tally: Tally, client: tf.Client, torch: Any) -> None:
    def batch(numbers: list[int]) -> Any:  # in a process of torch's
        return torch.stack([client.compute("echo", torch.full((30_000,), i), timeout=CALL_SECONDS) for i in numbers])

    how = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60}
    batches = torch.utils.data.DataLoader(range(16), batch_size=4, collate_fn=batch, **how)
    for i, batch in enumerate(batches):
        if not bool((batch == torch.arange(4 * i, 4 * i + 4)[:, None]).all()):
            tally.fail("a DataLoader gives other numbers")
    tally.add("DataLoaders")


def parent(address: str) -> None:
    """Fork a child that lives until its standard input ends, and work until somebody kills this process."""
    client = tf.connect(address)
    client.compute("echo", b"1")
    program, child = own_link(), os.fork()
    if child == 0:
        os.read(0, 1)
        os._exit(0)
    print(child, program, flush=True)
    while True:
        client.compute("echo", BLOCK[:MIB])


def dead_parent(tally: Tally, server: Server, mark: str) -> None:
    """Kill a process that has a link and a child. The link's program ends, the child lives."""
    with begin("_parent", server.address, mark=mark, stdin=subprocess.PIPE) as one:
        numbers = one.stdout.readline().split()
        if len(numbers) != 2:
            tally.fail("a process that forks does not start")
            return
        with Process(int(numbers[0])) as child, Process(int(numbers[1])) as program:
            one.kill()
            one.wait()
            killed = time.monotonic()
            if not program.ended(10):
                tally.fail("a dead parent's link program lives while a child of the parent does")
                program.kill()
            tally.took("end of a dead parent's program", killed, 5)
            if child.ended(0):
                tally.fail("the child has ended too")
            one.stdin.close()
            child.ended(10)
    tally.add("dead parents")


TASKS = 64


def tasks(tally: Tally, n: int, seed: int) -> None:
    """Make n calls by the tasks of an event loop, and see that nothing grows."""
    server = Server()
    client = tf.connect(server.address)
    x = BLOCK[:1024]

    async def stream(data: bytes, rng: random.Random) -> AsyncIterator[bytes]:
        for item in items(data, 1 + len(data) // 3):
            await asyncio.sleep(rng.uniform(0, 0.002))
            yield item

    async def mixed(c: tf.aio.Client, i: int, left: Iterator[int]) -> None:
        rng = random.Random(f"{seed}/{i}")
        for _ in left:
            data, how = content(rng, (0, 1, 1000, 30_000, 30_000, MIB + 1)), rng.random()
            if how < 0.05:
                task = asyncio.ensure_future(c.compute("slow", data or x, params={"delay": "1m"}))
                await asyncio.sleep(rng.uniform(0, 0.02))
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                    tally.fail("a call that was cancelled has a result")
                tally.add("cancelled")
            elif how < 0.1:
                y = await c.compute("echo", tf.Stream(stream(data, rng), (len(data),), "uint8"), timeout=CALL_SECONDS)
                check(y, data)
                tally.add("streams")
            else:
                check(await c.compute("echo", data, timeout=CALL_SECONDS), data)
                tally.add("correct")
            tally.tick()

    async def some(calls: int) -> None:
        left = iter(range(calls))
        async with tf.aio.connect(server.address) as c:
            await asyncio.gather(*[mixed(c, i, left) for i in range(TASKS)])

    def rest() -> dict[str, int]:
        client.compute("echo", x)  # reads what the program says of calls that were cancelled
        gc.collect()
        client._link.trim()
        now = usage(os.getpid())
        (own,) = re.findall(rb"^RssAnon:\s+(\d+)", read("/proc/self/status"), re.M)
        return {
            "pending": len(client._link.pending),
            "threads": now["threads"],
            "mappings": now["mappings"],  # the program keeps as many as were needed at a time
            "descriptors but theirs": now["descriptors"] - now["mappings"],
            "own MiB": int(own) >> 10,
        }

    asyncio.run(some(n // 4))
    base, served = rest(), held(client, server.pid)
    asyncio.run(some(n))
    returns(tally, "this process", rest, base, {"mappings": TASKS, "own MiB": 2 * TASKS})
    returns(tally, "the server", lambda: held(client, server.pid), served, SLACK)

    client.close()
    server.stop(tally)


def training(name: str, tally: Tally, n: int, seed: int) -> None:
    """Do a part of stress_training, which needs torch."""
    try:
        import torch  # noqa: F401
    except ImportError:
        print("torch is not installed: nothing is trained", flush=True)
        return
    sys.modules["stress"] = sys.modules[__name__]
    import stress_training

    getattr(stress_training, name)(tally, n, seed)


COUNTED: dict[str, tuple[Callable[[Tally, int, int], None], int, int, str]] = {
    "worker-kills": (worker_kills, 200, 8, "kill the processes of Python models"),
    "client-kills": (client_kills, 200, 10, "kill Python processes that use a server"),
    "program-kills": (program_kills, 50, 6, "kill the program of a link"),
    "tasks": (tasks, 10_000, 1000, "call from the tasks of an event loop"),
    "training-faults": (lambda *how: training("faults", *how), 300, 10, "train while processes are killed"),
    "training-sessions": (lambda *how: training("sessions", *how), 1000, 30, "keep a graph, and vanish"),
    "training-steps": (lambda *how: training("steps", *how), 10_000, 200, "train for long"),
}


def smoke(seed: int) -> int:
    """Run all briefly, each in a process of its own."""
    failed = []
    for name in [*COUNTED, "threads"]:
        size = ["--seconds", "8"] if name == "threads" else ["-n", str(COUNTED[name][2])]
        if subprocess.run([sys.executable, __file__, name, *size, "--seed", str(seed)], check=False).returncode:
            failed.append(name)
    print("stress: " + (f"failed: {', '.join(failed)}" if failed else "all ok"))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.py", description="Puts the Python side of tensorferry under stress.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    seeded = argparse.ArgumentParser(add_help=False)
    seeded.add_argument("--seed", type=int, help="of what is random; default: by the time, and printed")
    for name, (_, n, _, about) in COUNTED.items():
        p = commands.add_parser(name, help=about, parents=[seeded])
        p.add_argument("-n", type=int, default=n, help="how often (%(default)s)")
    p = commands.add_parser("threads", help="share a client among 40 threads, with forks between", parents=[seeded])
    p.add_argument("--seconds", type=float, default=60, help="how long (%(default)s)")
    commands.add_parser("smoke", help="all of it, briefly", parents=[seeded])
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)  # of forked children, which end with it
    if begun := {"_guest": guest, "_parent": parent}.get(sys.argv[1]) if sys.argv[1:] else None:
        begun(*sys.argv[2:])
        return 1
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    if args.command == "smoke":
        return smoke(seed)
    print(f"{args.command}: seed {seed}, numpy {'is not there' if numpy is None else numpy.__version__}", flush=True)
    tally = Tally(args.command)
    try:
        if args.command == "threads":
            threads(tally, args.seconds, seed)
        else:
            COUNTED[args.command][0](tally, args.n, seed)
    except BaseException:
        tally.fail(traceback.format_exc())
    return tally.end()


if __name__ == "__main__":
    sys.exit(main())
