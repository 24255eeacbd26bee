"""Measures the peak memory of a stream: make bench-python-memory.

A tensor larger than memory goes from a Python generator through relu into a file, and the
peaks of the three processes are printed: Python, the link's program, the server. It fails
if one of them is MOST or more, or if the file has other bytes.
"""

from __future__ import annotations

import argparse
import array
import os
import sys
import tempfile
import time
from collections.abc import Iterator

from common import Children

import tensorferry as tf
from tensorferry import _link, _program

BLOCK = 1 << 20  # bytes
MOST = 256 << 20


def blocks(count: int) -> Iterator[array.array[float]]:
    """Yield float32s of both signs. The first of a block is its number."""
    block = array.array("f", [-1.0, 1.0]) * (BLOCK // 8)
    for i in range(count):
        block[0] = i
        yield block


def check(path: str, count: int) -> None:
    want = array.array("f", [0.0, 1.0]) * (BLOCK // 8)
    with open(path, "rb") as file:
        for i in range(count):
            want[0] = i
            if file.read(BLOCK) != want.tobytes():
                sys.exit(f"memory: block {i} of the result is wrong")
        if file.read(1):
            sys.exit("memory: the result is too long")


def peak(pid: int) -> int:
    """Return the most bytes that a process had present at a time."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


def main() -> None:
    flags = argparse.ArgumentParser(description="Measure the peak memory of a tensor's way through Python.")
    flags.add_argument("--gib", type=int, default=16, help="size of the tensor")
    flags.add_argument("--quick", action="store_true", help="1 GiB")
    flags.add_argument("--folder", help="where the result of that size is written for a while")
    options = flags.parse_args()
    gib = 1 if options.quick else options.gib
    count = (gib << 30) // BLOCK
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        Children() as children,
        tf.connect(children.serve(_program.find())) as c,
    ):
        path = os.path.join(folder, "result")
        x = tf.Stream(blocks(count), [gib << 28], "float32")
        start = time.perf_counter()
        c.call("relu", {"": x}, out={"y": path}, regions=False).result()
        took = time.perf_counter() - start
        assert _link._process
        server = children[0].process.pid
        peaks = {"python": peak(os.getpid()), "link": peak(_link._process.pid), "server": peak(server)}
        check(path, count)
    print(f"{gib} GiB through relu into a file: {took:.1f} s, {(gib << 30) / took / 1e9:.2f} GB/s")
    for name, got in peaks.items():
        print(f"  {name:8} {got / (1 << 20):6.1f} MiB at the peak{'' if got < MOST else f', not below {MOST >> 20}'}")
    sys.exit(max(peaks.values()) >= MOST)


if __name__ == "__main__":
    main()
