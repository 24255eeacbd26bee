"""Model files that are pushed and pulled again, compared by the safetensors library."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import tempfile
import unittest
from typing import Any

import support
from support import ml_dtypes, numpy

try:
    import safetensors
    import safetensors.numpy
except ImportError:
    safetensors = None

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7, 13), (2, 3, 5, 7), (300_001,)]
METADATA: list[dict[str, str]] = [
    {"format": "pt"},
    {},
    {"": "no key", "é<&>\u2028": 'a "quoted"\n\\ text', "format": "np"},
    {"tags": json.dumps({f"tag {i}": i for i in range(9000)})},
]


def tensor(rng: random.Random, dtype: str, shape: tuple[int, ...]) -> Any:
    kind = numpy.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    raw = rng.randbytes(int(numpy.prod(shape, dtype=int)) * kind.itemsize)
    data = bytes(b & 1 for b in raw) if dtype == "bool" else raw
    return numpy.frombuffer(data, kind).reshape(shape)


def tensors(rng: random.Random, name: str) -> dict[str, Any]:
    """Return a few tensors; all files together have every data type in every shape."""
    made = {}
    for i in range(rng.randrange(1, 24)):
        dtype, shape = rng.choice(DTYPES), rng.choice(SHAPES)
        made[rng.choice([f"{name}.layers.{i}.weight", f"{name}/deep/{i}/w", f"größe {name}{i} [*]"])] = tensor(
            rng, dtype, shape
        )
    return made


def header(path: pathlib.Path) -> dict[str, Any]:
    data = path.read_bytes()
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def read(path: pathlib.Path) -> dict[str, Any]:
    """Return data type, shape and bytes by name, as the library reads a file."""
    return dict(safetensors.deserialize(path.read_bytes()))


@unittest.skipIf(
    safetensors is None or numpy is None or ml_dtypes is None, "safetensors, numpy and ml_dtypes are needed"
)
class ModelFiles(unittest.TestCase):
    def setUp(self) -> None:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.dir = pathlib.Path(place.name)
        self.server = support.Server("--store", str(self.dir / "store"))
        self.addCleanup(self.server.stop)

    def run_program(self, *args: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_")}
        done = subprocess.run(
            [support.program(), *args, "--server", self.server.address],
            cwd=self.dir,
            env=env,
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""), args)

    def compare(self, want: pathlib.Path, got: pathlib.Path) -> None:
        self.assertEqual(header(want).get("__metadata__", {}), header(got).get("__metadata__", {}))
        a, b = read(want), read(got)
        self.assertEqual(set(a), set(b))
        for name, x in a.items():
            self.assertEqual(x, b[name], name)
        if len(header(want).get("__metadata__", {})) < 2:  # the library has no order for more
            self.assertEqual(want.read_bytes(), got.read_bytes())

    def test_every_data_type_in_every_shape(self) -> None:
        rng = random.Random(1)
        made = {f"{d}.{i}": tensor(rng, d, s) for d in DTYPES for i, s in enumerate(SHAPES)}
        safetensors.numpy.save_file(made, self.dir / "all.safetensors", {"format": "pt"})
        self.run_program("push", "all.safetensors")
        self.run_program("pull", "all/*", "-o", "back.safetensors")
        self.compare(self.dir / "all.safetensors", self.dir / "back.safetensors")

    def test_files(self) -> None:
        for n in range(12):
            with self.subTest(n):
                rng = random.Random(n)
                file, back = self.dir / f"m{n}.safetensors", self.dir / f"back{n}.safetensors"
                safetensors.numpy.save_file(tensors(rng, "t"), file, METADATA[n % len(METADATA)] or None)
                self.run_program("push", file.name)
                self.run_program("pull", f"m{n}/", "-o", back.name)
                self.compare(file, back)

    def test_models_of_several_files(self) -> None:
        for n in range(7):
            with self.subTest(n):
                rng = random.Random(100 + n)
                folder, back, one = self.dir / f"s{n}", self.dir / f"back{n}", self.dir / f"one{n}.safetensors"
                folder.mkdir()
                weights: dict[str, str] = {}
                everything: dict[str, Any] = {}
                shards = rng.randrange(1, 5)
                for i in range(shards):
                    name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
                    made = tensors(rng, f"shard{i}")
                    safetensors.numpy.save_file(made, folder / name, METADATA[(n + i) % len(METADATA)] or None)
                    weights.update(dict.fromkeys(made, name))
                    everything.update(made)
                index = {"metadata": {"total_size": sum(t.nbytes for t in everything.values())}, "weight_map": weights}
                (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
                self.run_program("push", folder.name)
                self.run_program("pull", f"{folder.name}/", "-o", f"{back.name}/")
                self.assertEqual(sorted(p.name for p in folder.iterdir()), sorted(p.name for p in back.iterdir()))
                for file in folder.iterdir():
                    if file.suffix == ".json":
                        self.assertEqual(file.read_bytes(), (back / file.name).read_bytes())
                    else:
                        self.compare(file, back / file.name)
                self.run_program("pull", f"{folder.name}/", "-o", one.name)
                got = {name: bytes(t["data"]) for name, t in read(one).items()}
                self.assertEqual(got, {name: t.tobytes() for name, t in everything.items()})


if __name__ == "__main__":
    unittest.main()
