"""The demo's images, its network in three parts of torch, and what torch predicted with it.

The files are those of examples/fashion; a .safetensors file is eight bytes with the length
of a header in JSON, the header, and the bytes of the tensors.
"""

import gzip
import json
import pathlib
import struct

import numpy as np
import torch

FOLDER = pathlib.Path(__file__).parents[1] / "fashion"


def images():
    """Return the images as rows of 784 pixels from 0 to 1."""
    raw = gzip.decompress((FOLDER / "data/images-idx3-ubyte.gz").read_bytes())
    pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 784)
    return torch.from_numpy(pixels.astype(np.float32) / 255)


def predictions():
    """Return the class that torch gave each image."""
    return torch.from_numpy(np.load(FOLDER / "data/predictions.npy"))


def weights(part, folder=FOLDER):
    """Return the tensors of a part: bottom, trunk or top."""
    raw = (folder / "models" / part / "weights.safetensors").read_bytes()
    (n,) = struct.unpack_from("<Q", raw)
    state = {}
    for name, said in json.loads(raw[8 : 8 + n]).items():
        begin, end = said["data_offsets"]
        dtype = {"F16": torch.float16, "F32": torch.float32}[said["dtype"]]
        data = bytearray(raw[8 + n + begin : 8 + n + end])
        state[name] = torch.frombuffer(data, dtype=dtype).reshape(said["shape"]).float()
    return state


def linear(part):
    """Return the linear layer of a part."""
    state = weights(part)
    layer = torch.nn.Linear(*reversed(state["weight"].shape))
    layer.load_state_dict(state)
    return layer
