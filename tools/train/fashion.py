#!/usr/bin/env python3
"""Trains the demo's network on Fashion-MNIST and writes all that the demo embeds.

    apt-get install python3-torch dataset-fashion-mnist
    /usr/bin/python3 tools/train/fashion.py /usr/share/datasets/fashion-mnist examples/fashion

A 784-128-128-10 network (linear, relu, linear, relu, linear) is trained on the
60 000 training images in about two minutes of one CPU core. Into the second folder go

    data/images-idx3-ubyte.gz   the first 1000 test images, as the dataset has them
    data/labels-idx1-ubyte.gz   their labels
    data/predictions.npy        the class this network gives each, uint8
    models/bottom, trunk, top   the network in three stack models

Seeds are fixed, but another version of torch, or another CPU, may give other
weights: all files are written together so that they always fit each other. Every
image's best class leads the next by MARGIN at least, far more than the rounding
of any order of summation, so that every engine has to predict the same.
"""
import gzip
import json
import pathlib
import struct
import sys

import torch
from torch import nn

IMAGES = 1000  # test images kept
PIXELS = 28 * 28
HIDDEN = 128
CLASSES = 10
EPOCHS = 12
BATCH = 128
SEEDS = range(8)  # the first that passes is taken
ACCURACY = 0.86  # on the images kept, at least
MARGIN = 1e-3  # between the best two logits of any image kept, at least


def read_idx(path):
    """Returns the dimensions and the bytes of a gzipped idx file of bytes."""
    raw = gzip.decompress(path.read_bytes())
    zero, kind, rank = struct.unpack(">HBB", raw[:4])
    dims = struct.unpack(f">{rank}I", raw[4 : 4 + 4 * rank])
    data = raw[4 + 4 * rank :]
    if zero != 0 or kind != 8 or len(data) != torch.Size(dims).numel():
        raise SystemExit(f"{path} is no idx file of bytes")
    return dims, data


def write_idx(path, dims, data):
    head = struct.pack(f">HBB{len(dims)}I", 0, 8, len(dims), *dims)
    path.write_bytes(gzip.compress(head + data, 9, mtime=0))


def load(folder, part):
    _, pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    _, labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    x = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(-1, PIXELS)
    y = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    return x.float() / 255, y


def train(x, y, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(PIXELS, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )
    steps = EPOCHS * (len(x) // BATCH + 1)
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"seed {seed}, epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}", file=sys.stderr)
    return net.eval()


def write_model(folder, name, linear, relu):
    """Writes one linear layer, and perhaps a relu, as a stack model."""
    layers = [{"kind": "linear", "weight": "weight", "bias": "bias"}] + [{"kind": "relu"}] * relu
    model = {"name": name, "version": "1", "layers": layers}
    write_stack(folder, model, dict(sorted(linear.state_dict().items(), reverse=True)))  # the wide one first


def write_stack(folder, model, weights):
    """Writes the two files of a stack model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(model, indent=2) + "\n")
    header, data = {}, b""
    for key, value in weights.items():
        dtype, code = {torch.float32: ("F32", "f"), torch.float16: ("F16", "e")}[value.dtype]
        raw = struct.pack(f"<{value.numel()}{code}", *value.flatten().tolist())
        header[key] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "weights.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_npy(path, values):
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({len(values)},), }}".encode()
    head += b" " * (-(10 + len(head) + 1) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(values))


def main(dataset, out):
    torch.use_deterministic_algorithms(True)
    x, y = load(dataset, "train")
    test_x, test_y = load(dataset, "t10k")
    kept_x, kept_y = test_x[:IMAGES], test_y[:IMAGES]
    for seed in SEEDS:
        net = train(x, y, seed)
        with torch.no_grad():
            logits = net(kept_x)
            whole = (net(test_x).argmax(1) == test_y).double().mean().item()
        best = logits.topk(2).values
        margin = (best[:, 0] - best[:, 1]).min().item()
        predictions = logits.argmax(1)
        accuracy = (predictions == kept_y).double().mean().item()
        print(f"seed {seed}: accuracy {accuracy:.4f} on {IMAGES} images, {whole:.4f} on all {len(test_x)}; "
              f"smallest margin {margin:.5f}")
        if accuracy >= ACCURACY and margin >= MARGIN:
            break
    else:
        raise SystemExit(f"no seed reached accuracy {ACCURACY} with a margin of {MARGIN}; nothing written")

    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    (_, height, width), pixels = read_idx(dataset / "t10k-images-idx3-ubyte.gz")
    write_idx(data / "images-idx3-ubyte.gz", (IMAGES, height, width), pixels[: IMAGES * PIXELS])
    write_idx(data / "labels-idx1-ubyte.gz", (IMAGES,), bytes(kept_y.tolist()))
    write_npy(data / "predictions.npy", predictions.tolist())
    for name, layer, relu in (("bottom", net[0], True), ("trunk", net[2], True), ("top", net[4], False)):
        write_model(out / "models" / name, f"fashion-{name}", layer, relu)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
