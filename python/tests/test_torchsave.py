"""Files of torch.save that the program reads, and those it writes, compared by torch."""

from __future__ import annotations

import collections
import os
import pathlib
import random
import subprocess
import tempfile
import unittest
from typing import Any

import support
from support import torch

NAMES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
]
DICTS = 200


def dtypes() -> list[Any]:
    return [getattr(torch, n) for n in NAMES if hasattr(torch, n)]


def raw(t: Any) -> bytes:
    """Return the elements of a tensor, row-major."""
    dense = t.detach().contiguous().clone()
    storage = dense.untyped_storage() if hasattr(dense, "untyped_storage") else dense.storage().untyped()
    return bytes(storage)


def tensor(rng: random.Random, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor of random bits."""
    n = 1
    for dim in shape:
        n *= dim
    bits = torch.tensor([rng.randrange(2 if dtype == torch.bool else 256) for _ in range(n * size(dtype))])
    return bits.to(torch.uint8).view(dtype).reshape(shape) if n else torch.empty(shape, dtype=dtype)


def size(dtype: Any) -> int:
    return int(torch.empty(0, dtype=dtype).element_size())


def layouts(rng: random.Random, dtype: Any) -> list[Any]:
    """Return tensors that lie in their storages in every way."""
    x, shape = tensor(rng, dtype, (4, 6)), tuple(rng.randrange(1, 4) for _ in range(rng.randrange(6)))
    axes = list(range(len(shape)))
    rng.shuffle(axes)
    made = [
        tensor(rng, dtype, ()),
        tensor(rng, dtype, (0,)),
        tensor(rng, dtype, (3, 0, 2)),
        x,
        x.t(),
        x[1:3, 2:5],
        x[::2, ::3],
        x[:, 4],
        x[2, 3],
        x[1].expand(3, 6),
        x[0, 0].expand(2, 2),
        tensor(rng, dtype, shape).permute(axes),
    ]
    if dtype.is_floating_point:
        made += [torch.nn.Parameter(x), torch.nn.Parameter(x.t(), requires_grad=False)]
    return made


def state(rng: random.Random, n: int) -> Any:
    """Return a dict of tensors."""
    if n % 4 == 0:
        layers = [torch.nn.Linear(rng.randrange(1, 9), rng.randrange(1, 9)) for _ in range(rng.randrange(1, 40))]
        return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(3)).state_dict()
    made: Any = collections.OrderedDict() if n % 4 == 1 else {}
    for i in range(rng.randrange(1, 30)):
        shapes = layouts(rng, rng.choice(dtypes()))
        for j in range(rng.randrange(1, 3)):  # of one storage
            made[rng.choice([f"layers.{i}.w{j}", f"größe {i} [{j}]"])] = rng.choice(shapes)
    return made


@support.needs_torch
class TorchFiles(unittest.TestCase):
    def setUp(self) -> None:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.dir = pathlib.Path(place.name)
        self.server = support.Server("--store", "memory:512MiB")
        self.addCleanup(self.server.stop)

    def run_program(self, *args: str) -> None:
        done = subprocess.run(
            [support.program(), *args, "--server", self.server.address],
            cwd=self.dir,
            env={k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_")},
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""), args)

    def load(self, name: str) -> Any:
        return torch.load(self.dir / name, weights_only=True)

    def same(self, want: Any, got: Any) -> None:
        self.assertEqual((want.dtype, want.shape), (got.dtype, got.shape))
        self.assertEqual(raw(want), raw(got))

    def test_every_data_type_in_every_layout(self) -> None:
        rng = random.Random(1)
        made = {f"{i}.{j}": t for i, d in enumerate(dtypes()) for j, t in enumerate(layouts(rng, d))}
        for name, t in made.items():
            torch.save(t, self.dir / f"{name}.pt")
        self.run_program("push", *[f"{name}.pt" for name in made])
        for name, t in made.items():
            self.run_program("pull", name, "-o", f"back{name}.pt")
            self.same(t, self.load(f"back{name}.pt"))

    def test_state_dicts(self) -> None:
        made = [state(random.Random(n), n) for n in range(DICTS)]
        for n, tensors in enumerate(made):
            torch.save(tensors, self.dir / f"d{n}.pt")
        for n in range(0, DICTS, 20):
            self.run_program("push", *[f"d{i}.pt" for i in range(n, n + 20)])
        for n, tensors in enumerate(made):
            self.run_program("pull", f"d{n}/", "-o", f"back{n}.pt")
            got = self.load(f"back{n}.pt")
            self.assertEqual(sorted(tensors), sorted(got))
            for name, t in tensors.items():
                self.same(t, got[name])


if __name__ == "__main__":
    unittest.main()
