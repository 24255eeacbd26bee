"""What the examples of training share: images with labels, a server, and a picture of losses."""

import contextlib
import gzip
import os
import pathlib
import struct
import subprocess
import sys
import zlib

import numpy as np
import torch
from fashion import FOLDER, images

TRAIN = 800  # of the 1000 images; the others are to test with


def data():
    """Return images and labels to train on, and others to test with."""
    x = images()
    raw = gzip.decompress((FOLDER / "data/labels-idx1-ubyte.gz").read_bytes())
    y = torch.from_numpy(np.frombuffer(raw, np.uint8, offset=8).astype(np.int64))
    x = (x - x.mean()) / x.std()
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


@contextlib.contextmanager
def server(trunk, *flags, at=None):
    """Start a server that trains trunk, file:function, and yield its process and address; or None and at, if given.

    In a terminal: tensorferry serve --python trunk=file:function,train --python-threads 1
    """
    if at:
        yield None, at
        return
    # With one thread torch adds in the same order every time. As a child the server prints
    # its address, and it ends with its input.
    command = [sys.executable, "-m", "tensorferry", "serve", "--child", "--listen", "127.0.0.1:0"]  # not of PATH
    command += ["--python", f"trunk={trunk},train", "--python-threads", "1", *flags]
    env = {**os.environ, "TENSORFERRY_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        address = process.stdout.readline().strip()
        if not address:
            raise SystemExit("the server did not start")
        yield process, address
        # Popen's exit closes the pipes, and waits.


def accuracy(network, x, y):
    """Return the share of images that a network classifies as their labels say."""
    network.eval()
    with torch.no_grad():
        right = (network(x).argmax(1) == y).float().mean().item()
    network.train()
    return right


def save(state, path):
    """Write a file whole, or leave the old one."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def plot(path, curves, width=640, height=360, margin=20):
    """Draw curves, each (values, color, thickness), over each other into a PNG file, from 0 to the largest value."""
    canvas = np.full((height, width, 3), 255, np.uint8)
    canvas[margin:-margin, margin] = canvas[-margin, margin:-margin] = 0
    top = max(max(values) for values, *_ in curves)
    for values, color, thickness in curves:
        at = np.linspace(0, len(values) - 1, 8 * width)
        rows = height - margin - np.interp(at, range(len(values)), values) / top * (height - 2 * margin)
        columns = np.linspace(margin, width - margin, len(at))
        for down in range(thickness):
            for right in range(thickness):
                canvas[(rows + down - thickness / 2).astype(int), (columns + right - thickness / 2).astype(int)] = color

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    lines = b"".join(b"\0" + row.tobytes() for row in canvas)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    pathlib.Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + png)
