"""A client that is generated from the contract of kpu.torch, as its own clients are."""

from __future__ import annotations

import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Iterable, Iterator
from typing import Any

from support import Server, generated, interpreter_with_torch, torch

try:
    import grpc
    import grpc_tools  # noqa: F401
except ImportError:
    grpc = None

TENSORS = 3000
NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 complex64 complex128"


# What runs in a Python that has torch, which may be another one.


def make(folder: str, seed: int) -> None:
    """Write files of tensors of every type and layout."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]
    for i in range(TENSORS):
        dtype = dtypes[i % len(dtypes)]
        shape = [chance.choice((0, 1, 2, 2, 3)) for _ in range(chance.randrange(6))]
        room = [n * 2 + 1 for n in shape]
        count = torch.Size(room).numel()
        bits = torch.randint(0, 256, (max(count, 1) * torch.empty((), dtype=dtype).element_size(),), dtype=torch.uint8)
        x = (bits % 2 if dtype == torch.bool else bits).view(dtype)[:count].reshape(room)
        layout = chance.choice(("dense", "slice", "step", "permuted", "expanded", "parameter", "part"))
        if layout == "slice":
            x = x[tuple(slice(1, 1 + n) for n in shape)]
        elif layout == "step":
            x = x[tuple(slice(0, 2 * n, 2) for n in shape)]
        elif layout == "permuted":
            x = x.permute(chance.sample(range(len(room)), len(room)))
        elif layout == "expanded":
            x = x[tuple(slice(0, 1) for _ in shape)].expand(shape)
        elif layout == "part" and shape:
            x = x[-1]
        elif layout == "parameter" and (dtype.is_floating_point or dtype.is_complex) and "float8" not in str(dtype):
            x = torch.nn.Parameter(x.clone())
        torch.save(x, f"{folder}/{i}.pt")


def check(folder: str) -> None:
    """Compare what came back with what was sent, bit by bit."""
    for i in range(TENSORS):
        x, y = torch.load(f"{folder}/{i}.pt"), torch.load(f"{folder}/{i}.back.pt", weights_only=True)
        assert type(y) is torch.Tensor and not y.requires_grad and y.is_contiguous(), f"tensor {i} is {type(y)}"
        assert x.dtype == y.dtype and x.shape == y.shape, f"tensor {i} is {y.dtype} {y.shape}, was {x.dtype} {x.shape}"
        if x.numel():
            x = torch.empty(x.shape, dtype=x.dtype).copy_(x.detach()).flatten().view(torch.uint8)
            assert torch.equal(x, y.flatten().view(torch.uint8)), f"tensor {i} has other bits"


def chunks(pb: Any, name: str, file: bytes, size: int = 1 << 20) -> list[Any]:
    total = -(-len(file) // size)
    return [
        pb.TensorChunk(
            tensor_id=name,
            chunk_number=i,
            data=file[i * size : (i + 1) * size],
            total_chunks=total,
            is_last=i == total - 1,
            metadata={"mine": "1", "device": "cuda:0"} if i == 0 else {},
        )
        for i in range(total)
    ]


def joined(replies: Iterable[Any]) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yield what their assembler makes of chunks."""
    parts: dict[str, dict[int, Any]] = {}
    for c in replies:
        mine = parts.setdefault(c.tensor_id, {})
        mine[c.chunk_number] = c
        if len(mine) == c.total_chunks:
            del parts[c.tensor_id]
            yield c.tensor_id, b"".join(mine[i].data for i in sorted(mine)), dict(mine[0].metadata)


@unittest.skipIf(grpc is None, "grpcio-tools is not installed")
class TestKPU(unittest.TestCase):
    pb: Any
    rpc: Any

    @classmethod
    def setUpClass(cls) -> None:
        cls.pb, cls.rpc = generated(cls, "kpu/torch/server/service")
        server = Server("--kpu", "127.0.0.1:0")
        cls.addClassCleanup(server.stop)
        cls.native = server.address
        address = re.search(r"system=kpu.torch address=(\S+)", server.said)
        assert address is not None, server.said
        channel = grpc.insecure_channel(address.group(1))  # as theirs: without options
        cls.addClassCleanup(channel.close)
        cls.stub = cls.rpc.ServiceStub(channel)

    def pulled(self, count: int = 0, **parameters: str) -> list[tuple[str, bytes, dict[str, str]]]:
        return list(joined(self.stub.SendTensors(self.pb.TensorRequest(count=count, parameters=parameters))))

    def test_tensors_of_every_type_and_layout_come_back_bit_by_bit(self) -> None:
        python = interpreter_with_torch()
        if python is None:
            self.skipTest("no Python here has torch")
        with tempfile.TemporaryDirectory() as folder:
            seed = random.randrange(1 << 32)
            subprocess.run([python, __file__, "make", folder, str(seed)], check=True)
            chance = random.Random(seed)

            def sent() -> Iterator[Any]:
                for i in range(TENSORS):
                    file = pathlib.Path(folder, f"{i}.pt").read_bytes()
                    some = chunks(self.pb, str(i), file, chance.choice((100, 700, 1 << 20)))
                    if i % 3 == 0:
                        chance.shuffle(some)
                    yield from some

            back = set()
            for name, file, _ in joined(self.stub.StreamTensors(sent())):
                back.add(name)
                pathlib.Path(folder, name.removeprefix("processed_") + ".back.pt").write_bytes(file)
            self.assertEqual(back, {f"processed_{i}" for i in range(TENSORS)}, f"seed {seed}")
            subprocess.run([python, __file__, "check", folder], check=True)

    def test_what_is_pulled_can_be_uploaded_and_found_by_native_clients(self) -> None:
        import tensorferry as tf

        got = self.pulled(3, shape=" 600, 1000 ")
        self.assertEqual(len({name for name, _, _ in got}), 3)
        for name, file, said in got:
            self.assertRegex(name, r"^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$")
            self.assertEqual(
                said, {"shape": "[600, 1000]", "dtype": "torch.float32", "device": "cpu", "size_bytes": str(len(file))}
            )
        answer = self.stub.ReceiveTensors(c for name, file, _ in got for c in chunks(self.pb, name, file, 512 << 10))
        self.assertTrue(answer.success)
        self.assertEqual(answer.message, "Received 3 tensor(s)")
        self.assertEqual(list(answer.received_tensor_ids), [name for name, _, _ in got])
        with tf.connect(self.native) as client:
            names = {t.name for t in client.list("kpu/**")}
            self.assertLessEqual({f"kpu/{name}" for name, _, _ in got}, names)
            stored = f"kpu/{got[0][0]}"
            self.assertIn(bytes(client.pull(stored, like="tensor")[stored]), got[0][1])
        self.assertEqual(self.pulled(shape="no")[0][2]["shape"], "[10, 10]")
        self.assertEqual(self.stub.ReceiveTensors(iter(())).message, "Received 0 tensor(s)")

    def test_the_first_result_comes_before_the_second_tensor(self) -> None:
        (name, file, _), go = self.pulled(shape="600,1000")[0], threading.Event()

        def sent() -> Iterator[Any]:
            for _ in range(3):
                yield from chunks(self.pb, name, file)
                self.assertTrue(go.wait(30))
                go.clear()

        for back, same, _ in joined(self.stub.StreamTensors(sent())):
            self.assertEqual(back, f"processed_{name}")
            self.assertEqual(same, file)
            go.set()

    def test_a_client_that_still_writes_learns_why_it_is_refused(self) -> None:
        bad = b"\x80\x02\x8a\x0a" + bytes(8 << 20)
        for _ in range(5):
            for call in (
                lambda: self.stub.ReceiveTensors(iter(chunks(self.pb, "a", bad))),
                lambda: list(self.stub.StreamTensors(iter(chunks(self.pb, "a", bad)))),
            ):
                with self.assertRaises(grpc.RpcError) as failed:
                    call()
                self.assertEqual(failed.exception.code(), grpc.StatusCode.INVALID_ARGUMENT, failed.exception)
                self.assertIn("torch.save", failed.exception.details())


if __name__ == "__main__" and sys.argv[1:2] == ["make"]:
    make(sys.argv[2], int(sys.argv[3]))
elif __name__ == "__main__" and sys.argv[1:2] == ["check"]:
    check(sys.argv[2])
elif __name__ == "__main__":
    unittest.main()
