"""A client that is generated from the contract of SplitLearnComm, as its own clients are."""

from __future__ import annotations

import contextlib
import re
import sys
import time
import unittest
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import tensorferry as tf
from support import Server, generated, interpreter_with_torch, numpy, torch

try:
    import grpc
    import grpc_tools  # noqa: F401
except ImportError:
    grpc = None

FLOATS = ("float32",)


# What the server's Python has.


def double() -> Any:
    class Double(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(2.0))
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.drop(x * self.w)

    return Double()


def square() -> Any:
    class Square(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, x: Any) -> Any:
            return x * x

    return Square()


@tf.model(
    inputs={
        "hidden": (FLOATS, (1, -1, 4)),
        **{f"past_{part}_{n}": (FLOATS, (1, 2, -1, 2)) for n in range(2) for part in ("key", "value")},
    },
    outputs={
        "out": (FLOATS, (1, -1, 4)),
        **{f"present_{part}_{n}": (FLOATS, (1, 2, -1, 2)) for n in range(2) for part in ("key", "value")},
    },
    array="numpy",
)
def cached(hidden: Any, **past: Any) -> dict[str, Any]:
    """Adds what comes to the caches: as keys the halves of each row, as values their negatives."""
    new = hidden.reshape(1, -1, 2, 2).swapaxes(1, 2)
    found = {"out": hidden + past["past_key_0"].shape[2]}
    for name, cache in past.items():
        sign = -1 if "value" in name else 1
        found[name.replace("past", "present")] = numpy.concatenate([cache, sign * new], axis=2)
    return found


def sleeper(x: Any) -> Any:
    time.sleep(1)
    return x


# A client.


class TensorCodec:
    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype

    def encode(self, x: Any) -> bytes:
        return bytes(numpy.ascontiguousarray(x).astype(self.dtype).tobytes())

    def decode(self, data: bytes, shape: Any) -> Any:
        return numpy.frombuffer(data, self.dtype).reshape(tuple(shape)).astype("float32")


class CompressedTensorCodec(TensorCodec):
    def __init__(self, level: int = 6) -> None:
        super().__init__()
        self.level = level

    def encode(self, x: Any) -> bytes:
        return zlib.compress(super().encode(x), self.level)

    def decode(self, data: bytes, shape: Any) -> Any:
        return super().decode(zlib.decompress(data), shape)


@unittest.skipIf(grpc is None or numpy is None, "grpcio-tools and numpy are not installed")
class Case(unittest.TestCase):
    pb: Any
    rpc: Any

    @classmethod
    def setUpClass(cls) -> None:
        cls.pb, cls.rpc = generated(cls, "splitlearn/comm/compute_service")

    @classmethod
    def serve(cls, model: str, *options: str, python: str = sys.executable) -> tuple[Server, str]:
        server = Server("--splitlearn", f"127.0.0.1:0,model={model}", *options, python=python)
        cls.addClassCleanup(server.stop)
        address = re.search(r"system=SplitLearnComm address=(\S+)", server.said)
        assert address is not None, server.said
        return server, address.group(1)

    @classmethod
    @contextlib.contextmanager
    def client(cls, address: str, **options: Any) -> Iterator[Any]:
        most = [("grpc.max_send_message_length", 104857600), ("grpc.max_receive_message_length", 104857600)]
        with grpc.insecure_channel(address, options=most + list(options.items())) as channel:
            yield cls.rpc.ComputeServiceStub(channel)

    def compute(self, stub: Any, x: Any, codec: Any, **more: Any) -> tuple[Any, Any]:
        """The result of a call, and all of the answer."""
        said = stub.Compute(self.pb.ComputeRequest(data=codec.encode(x), shape=x.shape, **more), timeout=30)
        return codec.decode(said.data, said.shape), said

    @contextlib.contextmanager
    def refused(self, code: str, text: str = "") -> Iterator[None]:
        with self.assertRaises(grpc.RpcError) as caught:
            yield
        self.assertEqual(caught.exception.code().name, code, caught.exception.details())
        self.assertIn(text, caught.exception.details())


CODECS: dict[str, Callable[[], Any]] = {
    "float32": TensorCodec,
    "float16": lambda: TensorCodec("float16"),
    "zlib": CompressedTensorCodec,
    "zlib 1": lambda: CompressedTensorCodec(1),
}


class Computing(Case):
    server: Server
    address: str

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.server, cls.address = cls.serve(
            "relu", "--python", "cached=test_splitlearn:cached", "--python", "sleeper=test_splitlearn:sleeper",
            "--keepalive-min", "100ms",
        )  # fmt: skip

    def test_codecs(self) -> None:
        rng = numpy.random.default_rng(1)
        with self.client(self.address) as stub:
            for name, made in CODECS.items():
                for shape in [(), (0,), (3, 0), (1,), (2, 3), (4, 5, 6, 7), (300, 1000)]:
                    with self.subTest(name, shape=shape):
                        x = rng.integers(-3, 4, shape).astype("float32")
                        y, said = self.compute(stub, x, made(), request_id=7)
                        self.assertEqual(tuple(said.shape), shape)
                        self.assertTrue(numpy.array_equal(y, numpy.maximum(x, 0)))
                        self.assertEqual(said.request_id, 7)
                        self.assertGreater(said.compute_time_ms, 0)
                        self.assertGreater(said.monitoring_data.memory_mb, 0)

    def test_caches(self) -> None:
        with self.client(self.address) as stub:
            for name, made in CODECS.items():
                with self.subTest(name):
                    codec, entries, rows = made(), [], []
                    for token in range(3):
                        x = numpy.full((1, 1, 4), token, "float32")
                        rows.append(x)
                        y, said = self.compute(
                            stub, x, codec, model_id="cached", past_key_values=entries, use_cache=True
                        )
                        self.assertTrue(numpy.array_equal(y, x + token))
                        entries = list(said.present_key_values)
                        self.assertEqual(len(entries), 2)
                        want = numpy.concatenate(rows, 1).reshape(1, -1, 2, 2).swapaxes(1, 2)
                        for e in entries:
                            self.assertTrue(numpy.array_equal(codec.decode(e.key_data, e.key_shape), want))
                            self.assertTrue(numpy.array_equal(codec.decode(e.value_data, e.value_shape), -want))

    def test_info_and_health(self) -> None:
        with self.client(self.address) as stub:
            health = stub.HealthCheck(self.pb.HealthRequest())
            self.assertEqual(health.status, "ok")
            info = stub.GetServiceInfo(self.pb.ServiceInfoRequest())
            self.assertEqual((info.service_name, info.version, info.device), ("relu", "1.0.0", "cpu"))

    def test_errors(self) -> None:
        x = numpy.ones((2, 3), "float32")
        with self.client(self.address) as stub:
            for code, more in {
                "NOT_FOUND": {"model_id": "nothing"},
                "INVALID_ARGUMENT": {"use_cache": True},
            }.items():
                with self.refused(code):
                    self.compute(stub, x, TensorCodec(), **more)
            with self.refused("INVALID_ARGUMENT"):
                stub.Compute(self.pb.ComputeRequest(data=x.tobytes(), shape=(3, 5)))
            with self.refused("DEADLINE_EXCEEDED"):
                stub.Compute(self.pb.ComputeRequest(data=x.tobytes(), shape=x.shape, model_id="sleeper"), timeout=0.1)

    def test_monitoring_is_not_cut_off_by_its_pings(self) -> None:
        often = {
            "grpc.keepalive_time_ms": 200,
            "grpc.keepalive_timeout_ms": 10000,
            "grpc.http2.max_pings_without_data": 0,
        }
        with self.client(self.address, **often) as stub:
            stream = stub.StreamMonitoring(self.pb.MonitoringStreamRequest(sampling_interval=5.0))
            for _ in range(2):  # at once, and after 25 pings
                self.assertGreater(next(stream).snapshot.timestamp, 0)
            stream.cancel()

    def test_ten_clients(self) -> None:
        def work(n: int) -> None:
            with self.client(self.address) as stub:
                for i in range(20):
                    x = numpy.full((n + 1, 3), i, "float32")
                    y, _ = self.compute(stub, x, TensorCodec())
                    assert numpy.array_equal(x, y)

        with ThreadPoolExecutor(10) as pool:
            list(pool.map(work, range(10)))


class Training(Case):
    server: Server
    address: str

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        python = interpreter_with_torch()
        if python is None:
            raise unittest.SkipTest("torch is not installed")
        cls.server, cls.address = cls.serve(
            "double", "--python", "double=test_splitlearn:double,train",
            "--python", "square=test_splitlearn:square,train", python=python,
        )  # fmt: skip

    def step(self, stub: Any, codec: Any, x: Any, g: Any, id: str, model: str = "") -> tuple[Any, Any]:
        y, said = self.compute(stub, x, codec, training_mode=True, forward_id=id, model_id=model)
        self.assertEqual(said.forward_id, id)
        back = stub.ComputeBackward(
            self.pb.BackwardRequest(grad_output_data=codec.encode(g), grad_output_shape=g.shape, forward_id=id),
            timeout=30,
        )
        self.assertEqual(back.forward_id, id)
        self.assertGreater(back.backward_time_ms, 0)
        return y, codec.decode(back.grad_input_data, back.grad_input_shape)

    def gone(self, id: str) -> Any:
        return self.refused("NOT_FOUND", f"'Activation {id} not found in cache (may have expired or never cached)'")

    def backward(self, stub: Any, id: str, value: float = 5.0) -> None:
        data = numpy.full(1, value, "float32").tobytes()
        stub.ComputeBackward(self.pb.BackwardRequest(grad_output_data=data, grad_output_shape=[1], forward_id=id))

    def test_gradients_are_true(self) -> None:
        with self.client(self.address) as stub:
            for name, made in CODECS.items():
                with self.subTest(name):
                    x, five = numpy.array([3.0, -1.5], "float32"), numpy.full(2, 5.0, "float32")
                    y, g = self.step(stub, made(), x, five, f"a {name}")
                    self.assertEqual(y.tolist(), [6.0, -3.0])  # nothing dropped
                    self.assertEqual(g.tolist(), [10.0, 10.0])
                    y, g = self.step(stub, made(), x, five, f"b {name}", "square")
                    self.assertEqual(y.tolist(), [9.0, 2.25])
                    self.assertEqual(g.tolist(), [30.0, -15.0])

    def test_a_pass_is_used_once(self) -> None:
        one = numpy.ones(1, "float32")
        with self.client(self.address) as stub:
            self.step(stub, TensorCodec(), one, one, "once")
            for id in ("once", "never"):
                with self.gone(id):
                    self.backward(stub, id)
            _, said = self.compute(stub, one, TensorCodec(), training_mode=True)
            self.assertEqual(len(said.forward_id), 36)
            with self.refused("INVALID_ARGUMENT"):  # a gradient of another shape, and the pass is gone
                stub.ComputeBackward(
                    self.pb.BackwardRequest(
                        grad_output_data=bytes(12), grad_output_shape=[3], forward_id=said.forward_id
                    )
                )
            with self.gone(said.forward_id):
                self.backward(stub, said.forward_id)

    def test_a_pass_belongs_to_its_connection(self) -> None:
        alone = {"grpc.use_local_subchannel_pool": 1}  # or both have one connection
        x, one = numpy.array([3.0, -1.5], "float32"), numpy.ones(2, "float32")
        with self.client(self.address, **alone) as stub, self.client(self.address, **alone) as other:
            self.compute(stub, x, TensorCodec(), training_mode=True, forward_id="f", model_id="square")
            for same in (stub, other):
                with self.refused("ALREADY_EXISTS", "waits for its gradient"):
                    self.compute(same, one, TensorCodec(), training_mode=True, forward_id="f", model_id="square")
            request = self.pb.BackwardRequest(grad_output_data=one.tobytes(), grad_output_shape=[2], forward_id="f")
            with self.gone("f"):
                other.ComputeBackward(request)
            g = stub.ComputeBackward(request).grad_input_data
            self.assertEqual(numpy.frombuffer(g, "float32").tolist(), [6.0, -3.0])
            self.step(other, TensorCodec(), x, one, "f", "square")

    def test_the_oldest_of_101_is_gone(self) -> None:
        one = numpy.ones(1, "float32")
        with self.client(self.address) as stub:
            for n in range(101):
                self.compute(stub, one, TensorCodec(), training_mode=True, forward_id=str(n))
            with self.gone("0"):
                self.backward(stub, "0")
            for n in range(1, 101):
                self.backward(stub, str(n))
            with tf.connect(self.server.address) as client:
                [double] = [m for m in client.info()["models"] if m["name"] == "double"]
                self.assertEqual(double["gauges"]["training_graphs"], 0)

    def test_another_trainer_comes_when_nobody_needs_the_lease_and_keeps_others_out(self) -> None:
        one = numpy.ones(1, "float32")
        with self.client(self.address) as stub, tf.connect(self.server.address) as client:

            def ask(part: str, **params: Any) -> Any:
                return client.call(f"double/{part}", {}, params=params).result()["y"].tolist()

            self.compute(stub, one, TensorCodec(), training_mode=True, forward_id="kept")
            with self.assertRaises(tf.FailedPrecondition):
                ask("lease", token="mine")
            self.backward(stub, "kept")
            for _ in range(100):
                with contextlib.suppress(tf.FailedPrecondition):
                    ask("lease", token="mine")
                    break
                time.sleep(0.1)
            _, square, _, passes = ask("step", lease="mine", norm="true")
            self.assertEqual((square, passes), (0, 0), "gradients of weights that nobody applies")
            with self.refused("PERMISSION_DENIED", "another client"):
                self.compute(stub, one, TensorCodec(), training_mode=True)
            self.compute(stub, one, TensorCodec())
            ask("lease", token="mine", end="true")
            self.step(stub, TensorCodec(), one, one, "again")

    def test_ten_clients(self) -> None:
        def work(n: int) -> None:
            with self.client(self.address) as stub:
                for i in range(5):
                    x = numpy.full(2, i, "float32")
                    _, g = self.step(stub, TensorCodec(), x, x + n, f"{n} {i}")
                    assert g.tolist() == (2 * (x + n)).tolist()

        with ThreadPoolExecutor(10) as pool:
            list(pool.map(work, range(10)))


class NotTraining(Case):
    def test_training_is_off_as_in_their_server(self) -> None:
        _, address = self.serve("relu")
        with self.client(address) as stub:
            one = numpy.ones(1, "float32")
            _, said = self.compute(stub, one, TensorCodec(), training_mode=True, forward_id="a")
            self.assertFalse(said.HasField("forward_id"))
            with self.refused("FAILED_PRECONDITION", "Training mode not enabled on server"):
                stub.ComputeBackward(
                    self.pb.BackwardRequest(grad_output_data=bytes(4), grad_output_shape=[1], forward_id="a")
                )


if __name__ == "__main__":
    unittest.main()
