"""Models of Python: functions, classes, torch modules, served by this process and called through a server."""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import types
import unittest
import unittest.mock
from typing import Any

import tensorferry as tf
from support import descriptors, eventually, needs_numpy, needs_torch, numpy, pattern, program, torch
from tensorferry import _tensor, _wire
from tensorferry._link import Memory
from tensorferry._model import Call, find, prepare
from tensorferry._worker import Block, Worker, failure, pinned


class Copies(unittest.TestCase):
    def test_a_tensor_is_free_as_soon_as_it_was_copied(self) -> None:
        x = bytearray(b"1234")
        before = sys.getrefcount(x)
        gc.disable()
        self.addCleanup(gc.enable)
        source = _tensor.of(x)
        source.write(source.address)
        del source
        self.assertEqual(sys.getrefcount(x), before)


class Cudart:
    """Stands in for CUDA's runtime, and notes what is registered with it."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            assert address not in self.registered
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class Pins(unittest.TestCase):
    def memory(self) -> Memory:
        fd = os.memfd_create("m")
        self.addCleanup(os.close, fd)
        os.truncate(fd, 1 << 16)
        return Memory(1, 1 << 16, fd)

    def test_memory_is_registered_once_and_for_as_long_as_it_is_known(self) -> None:
        cudart, memory = Cudart(), self.memory()
        fake = types.SimpleNamespace(cuda=types.SimpleNamespace(cudart=lambda: cudart))
        with unittest.mock.patch.dict(sys.modules, torch=fake):  # type: ignore[dict-item]
            Worker.pin(types.SimpleNamespace(pins=False), memory)  # type: ignore[arg-type]
            self.assertEqual(cudart.registered, {})
            for _ in range(2):
                Worker.pin(types.SimpleNamespace(pins=True), memory)  # type: ignore[arg-type]
                self.assertEqual(cudart.registered, {memory.base: 1 << 16})
        view = memoryview(memory.map)
        del memory
        gc.collect()
        self.assertEqual(cudart.registered, {})
        self.assertEqual(view[0], 0)  # it is mapped still

    def test_memory_that_cannot_be_registered_is_used_as_it_is(self) -> None:
        cudart, memory, said = Cudart(code=801), self.memory(), io.StringIO()
        with contextlib.redirect_stdout(said):
            memory.unpin = pinned(cudart, memory.base, memory.size)
        self.assertIn("CUDA error 801", said.getvalue())
        del memory
        gc.collect()


class Kept:
    """An object with attributes, which says when it is closed."""

    def __init__(self, **attributes: Any) -> None:
        self.closed = 0
        self.__dict__.update(attributes)

    def close(self) -> None:
        self.closed += 1
        raise ValueError("which harms nobody")


class States(unittest.TestCase):
    """What becomes of call.state."""

    def held(self, **state: Any) -> int:
        return _tensor.held(state, set())

    def test_tensors_are_counted_once_wherever_they_are(self) -> None:
        x = tf.Tensor(bytearray(100))
        part = tf.Tensor(memoryview(x.data.obj)[10:20])
        deep = Kept(a=[(x, {"x": x})], b={1, 2.0, "c", None})
        deep.__dict__["self"] = deep
        self.assertEqual(self.held(deep=deep, x=x, part=part, none=None), 100)
        self.assertEqual(self.held(), 0)
        self.assertEqual(_tensor.held({"x": x, "deep": deep}, {id(deep), id(x)}), 0)

    def test_of_very_many_objects_some_are_looked_at(self) -> None:
        self.assertEqual(self.held(few=[tf.Tensor(bytearray(1)) for _ in range(100)]), 100)
        many = self.held(many=[[tf.Tensor(bytearray(1)) for _ in range(1000)] for _ in range(20)])
        self.assertGreater(many, 1000)
        self.assertLessEqual(many, 10_000)

    @needs_numpy
    def test_views_of_arrays_are_not_counted_beside_them(self) -> None:
        a = numpy.zeros((10, 8), "float32")
        self.assertEqual(self.held(a=a, part=a[2:], turned=a.T[:, 1:]), 320)
        self.assertEqual(self.held(part=a[2:3]), 320, "it keeps all of the array")

    @needs_torch
    def test_tensors_of_torch_are_counted_by_their_storage(self) -> None:
        t = torch.zeros(10, 8)
        self.assertEqual(self.held(t=t, part=t[2:], detached=t.detach()), 320)
        self.assertEqual(self.held(part=t[2:3]), 320)
        self.assertEqual(self.held(sparse=t.to_sparse(), t=t), 320)
        if numpy is not None:
            self.assertEqual(self.held(array=t.numpy(), t=t), 320)

    def test_what_has_a_close_is_closed_once(self) -> None:
        call = Call("c", {}, [], None)
        kept, other = Kept(), Kept()
        call.state.update(a=kept, b=kept, c=1, d=None, e=other, f=Kept)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            Worker.end(None, call)  # type: ignore[arg-type]
            Worker.end(None, ValueError())  # type: ignore[arg-type]
            Worker.end(None, None)  # type: ignore[arg-type]
        self.assertEqual((kept.closed, other.closed), (1, 1))
        self.assertEqual(said.getvalue().count("ValueError: which harms nobody"), 2)

    def test_an_answer_of_a_sequence_says_no_more_than_its_state(self) -> None:
        for max_rows, says in ((0, b'{"kept":5}'), (1, b'{"state":7}')):
            sent: list[bytes] = []
            kept = types.SimpleNamespace(kept=lambda: {"kept": 5})
            worker: Any = types.SimpleNamespace(training=kept, told=None, link=types.SimpleNamespace(send=sent.append))
            block: Any = Block({"id": 1}, 0, None, types.SimpleNamespace(max_rows=max_rows))  # type: ignore[arg-type]
            block.says = b'{"state":7}' if max_rows else b""
            Worker.answer(worker, block, 0)
            self.assertEqual(_wire.decode(sent[0])["json"], says)
            self.assertEqual(worker.told is None, bool(max_rows))


class Failures(unittest.TestCase):
    def test_a_code_of_a_model_s_own_exception_is_not_one_of_grpc(self) -> None:
        class Weather(Exception):
            public, code = True, "E42"

        code, said = failure(Weather("no such weather"))
        self.assertEqual(code, 2)
        self.assertIn(b"no such weather", said)


class Says(unittest.TestCase):
    """What becomes of declarations."""

    def test_a_function_has_an_input_for_each_parameter(self) -> None:
        def f(a: Any, b: Any, call: Any, c: int = 1) -> Any:
            return a

        p = prepare(f)
        self.assertEqual(
            (list(p.inputs), list(p.outputs), p.rows, p.wants_call, p.by_name), (["a", "b"], ["y"], 0, True, {"a", "b"})
        )
        self.assertEqual(list(prepare(lambda **inputs: inputs).inputs), ["x"])

    def test_an_input_with_a_default_is_optional(self) -> None:
        def said(f: Any, **declared: Any) -> list[str]:
            p = prepare(f, {"array": "tensor", **declared})
            return [n + "?" * port.optional + "/" * (n not in p.by_name) for n, port in p.inputs.items()]

        def f(x: Any, mask: Any = None, *, bias: Any = None, scale: float = 1.0, call: Any = None) -> Any:
            return x

        class Defaults(tf.Model):
            def compute(self, ids: Any = None, mask: Any = None) -> Any:
                return ids

        self.assertEqual(said(f), ["x", "mask?", "bias?"])
        self.assertEqual(said(f, params={"bias": tf.Param()}), ["x", "mask?"])
        self.assertEqual(said(f, inputs=["x", "scale"]), ["x", "scale?"])
        self.assertEqual(said(f, inputs={"y": None, "mask": tf.Port(whole=True)}), ["y/", "mask?"])
        self.assertEqual(said(f, inputs={"mask": tf.Port(whole=True), "x": None}), ["mask?", "x"])
        self.assertEqual(said(Defaults), ["x/", "mask?"])
        self.assertEqual(said(Defaults, inputs=["ids", "mask"]), ["ids", "mask?"])

    def test_ports_are_said_in_several_ways(self) -> None:
        p = prepare(
            lambda a, b, c, d: a,
            {
                "inputs": {
                    "a": "float32",
                    "b": ("float32", [-1, 3]),
                    "c": (["int8", "int16"], None),
                    "d": tf.Port(whole=True),
                }
            },
        )
        self.assertEqual(p.inputs["a"], tf.Port(("float32",)))
        self.assertEqual(p.inputs["b"], tf.Port(("float32",), (-1, 3)))
        self.assertEqual(p.inputs["c"], tf.Port(("int8", "int16")))
        self.assertTrue(p.inputs["d"].whole)
        with self.assertRaisesRegex(TypeError, "port a"):
            prepare(lambda a: a, {"inputs": {"a": 3}})
        with self.assertRaisesRegex(TypeError, "does not declare row;"):
            tf.model(row=1)

    def test_what_can_be_called_without_arguments_is_a_factory(self) -> None:
        @tf.model(rows=1, version="2")
        def inner(x: Any) -> Any:
            return x

        @tf.model(rows=2, block_rows=9)
        def make(width: int = 3) -> Any:
            return inner

        p = prepare(make, {"version": "3"})
        self.assertEqual((p.rows, p.block_rows, p.version), (1, 9, "3"))

        class Given(tf.Model):
            rows = "all"

            def setup(self) -> None:
                self.ready = True

            def compute(self, h: Any) -> Any:
                return h

        p = prepare(Given)
        self.assertEqual((p.rows, list(p.inputs), p.compute.ready), (-1, ["h"], True))

    def test_a_target_that_is_none_says_so(self) -> None:
        with self.assertRaisesRegex(ValueError, "write module:function"):
            find("os")
        with self.assertRaisesRegex(TypeError, "cannot be called"):
            prepare(3)

    def test_what_may_be_computed_at_a_time(self) -> None:
        async def coroutine(x: Any) -> Any: ...

        class Called(tf.Model):
            async def compute(self, x: Any) -> Any: ...

        class Three(Called):
            concurrency = 3

        for target, said, want in (
            (coroutine, {}, (16, 1)), (coroutine, {"concurrency": 2}, (2, 1)), (Called, {}, (16, 1)), (Three, {}, (3, 1)),
            (lambda x: x, {}, (1, 1)), (lambda x: x, {"concurrency": 4}, (4, 4)), (coroutine, {"stateful": True}, (1, 1)),
        ):  # fmt: skip
            model = prepare(target, said)
            self.assertEqual((model.concurrency, model.threads, model.ready()["concurrency"]), (*want, want[0]))
        with self.assertRaisesRegex(ValueError, "concurrency=2: a model that is stateful computes one block at a time"):
            prepare(coroutine, {"stateful": True, "concurrency": 2})
        for wrong in (0, -1, 257, "many", 1.5):
            with self.assertRaisesRegex(ValueError, "it is 1 to 256"):
                prepare(coroutine, {"concurrency": wrong})

    def test_params_are_read_as_their_kind(self) -> None:
        p = tf.Param(float, 2.0)
        self.assertEqual((p.parse("a", "3"), p.parse("a", None)), (3.0, 2.0))
        self.assertIs(tf.Param(bool).parse("b", "true"), True)
        with self.assertRaisesRegex(tf.ModelError, "param a='x' is not a float"):
            p.parse("a", "x")


class Computes(unittest.TestCase):
    """Through a server."""

    def setUp(self) -> None:
        program()

    def served(self, model: Any, **more: Any) -> Any:
        server = self.enterContext(tf.serve(model, port=0, name="m", **more)) if hasattr(self, "enterContext") else None
        if server is None:  # before 3.11
            server = tf.serve(model, port=0, name="m", **more)
            self.addCleanup(server.close)
        client = tf.connect(server.address)
        self.addCleanup(client.close)
        return client

    def test_without_numpy_a_model_has_tensors(self) -> None:
        def backwards(x: Any, call: Any) -> Any:
            y = call.empty(x.shape, x.dtype)
            y.data[:] = bytes(x)[::-1]
            return y

        c = self.served(backwards, array="tensor")
        for n in (0, 1, 100_000):
            data = pattern(n)
            self.assertEqual(bytes(memoryview(c.compute("m", tf.Tensor(data)).data)), data[::-1])

    def test_an_input_is_a_result_and_goes_into_several(self) -> None:
        c = self.served(lambda x: {"a": x, "b": bytes(x), "c": x}, outputs=["a", "b", "c"], array="tensor")
        y = c.call("m", {"x": tf.Tensor(b"some bytes")}).result()
        self.assertEqual({k: bytes(v.data) for k, v in y.items()}, dict.fromkeys("abc", b"some bytes"))

    def test_a_call_leaves_out_what_is_optional(self) -> None:
        def f(x: Any, mask: Any = None, bias: Any = None, *, call: Any) -> Any:
            has = [name for name, y in (("mask", mask), ("bias", bias)) if y is not None]
            return tf.Tensor(f"{bytes(x.data)} {has} {[i['port'] for i in call.inputs]}".encode())

        c = self.served(f, array="tensor")
        x, y = tf.Tensor(b"x"), tf.Tensor(b"y")

        def of(**inputs: Any) -> str:
            return bytes(c.call("m", inputs).result()["y"].data).decode()

        self.assertEqual(bytes(c.compute("m", x)).decode(), "b'x' [] ['x']")
        self.assertEqual(of(x=x), "b'x' [] ['x']")
        self.assertEqual(of(bias=y, x=x), "b'x' ['bias'] ['x', 'bias']")
        self.assertEqual(of(bias=y, x=x, mask=y), "b'x' ['mask', 'bias'] ['x', 'mask', 'bias']")
        for inputs in ({"mask": x}, {"mask": x, "bias": x}, {"x": x, "max": x}, {}):
            with self.assertRaisesRegex(tf.InvalidArgument, r'takes inputs \["x" "mask\?" "bias\?"\], the call has \['):
                of(**inputs)
        (m,) = (m for m in c.models() if m.name == "m")
        self.assertEqual([n for n, p in m.inputs.items() if p.optional], ["mask", "bias"])

    @needs_numpy
    def test_rows_and_whole_inputs_are_left_out(self) -> None:
        import numpy as np

        def f(x: Any, table: Any = None, bias: Any = None) -> Any:
            return x + (0 if table is None else table.sum()) + (0 if bias is None else bias)

        c = self.served(f, inputs={"table": tf.Port(whole=True), "x": None, "bias": None}, rows=1, block_rows=3)
        x, table = np.arange(20.0).reshape(10, 2), np.ones((4, 5))
        for given in ({}, {"table": table}, {"bias": 2 * x}, {"table": table, "bias": 2 * x}):
            want = f(x, **given)
            np.testing.assert_array_equal(c.call("m", {**given, "x": x}).result()["y"], want)
        with c.sequence("m", max_rows=9) as s:  # each step has those that it has
            for given in ({}, {"bias": 2 * x[:2]}, {"table": table}, {}):
                np.testing.assert_array_equal(s.step(x=x[:2], **given), f(x[:2], **given))
        with self.assertRaisesRegex(tf.FailedPrecondition, '"bias": wanted 10 rows'):
            c.call("m", {"x": x, "bias": x[1:]}).result()

    def test_a_failure_says_its_class_alone_unless_it_is_public(self) -> None:
        def f(x: Any, call: Any) -> Any:
            if call.params["public"]:
                raise tf.ModelError("no such weather")
            raise KeyError("secret")

        c = self.served(f, params={"public": tf.Param(bool, False)}, array="tensor")
        x = tf.Tensor(b"x")
        with self.assertRaisesRegex(tf.Internal, "KeyError in the model's code") as said:
            c.compute("m", x)
        self.assertNotIn("secret", str(said.exception))
        with self.assertRaisesRegex(tf.Internal, "no such weather"):
            c.compute("m", x, params={"public": "true"})
        with self.assertRaisesRegex(tf.InvalidArgument, '"public": wanted a bool, got "perhaps"'):
            c.compute("m", x, params={"public": "perhaps"})
        with self.assertRaisesRegex(tf.Internal, "no such weather"):
            c.compute("m", x, params={"public": "T"})
        with self.assertRaisesRegex(tf.InvalidArgument, "known are public"):
            c.compute("m", x, params={"private": "1"})

    def test_a_call_tells_of_itself_and_keeps_its_state(self) -> None:
        seen: list[Any] = []

        def f(x: Any, call: Any) -> Any:
            call.state["blocks"] = call.state.get("blocks", 0) + 1
            seen.append((call.row, call.rows, call.state["blocks"], call.inputs[0]["shape"]))
            return x

        c = self.served(f, rows=1, block_rows=2, stateful=True, array="tensor", inputs={"x": "int8"})
        c.compute("m", tf.Tensor(array.array("b", range(5))))
        self.assertEqual(seen, [(0, 2, 1, [5]), (2, 2, 2, [5]), (4, 1, 3, [5])])

    def test_a_cancelled_call_is_heard(self) -> None:
        began, heard = threading.Event(), threading.Event()

        def f(x: Any, call: Any) -> Any:
            began.set()
            while not call.cancelled:
                pass
            heard.set()
            return x

        c = self.served(f, array="tensor")
        call = c.call("m", {"x": tf.Tensor(b"x")})
        self.assertTrue(began.wait(10))
        call.cancel()
        self.assertTrue(heard.wait(10))

    def test_an_async_model_runs_and_is_cancelled_with_its_call(self) -> None:
        began, ended = threading.Event(), threading.Event()
        loops = set()

        async def f(x: Any, call: Any) -> Any:
            loops.add(asyncio.get_running_loop())
            parts = await asyncio.gather(*[asyncio.sleep(0, bytes(x.data)) for _ in range(3)])
            if call.params["rest"]:
                try:
                    began.set()
                    await asyncio.sleep(60)
                finally:
                    ended.set()
            return tf.Tensor(b"".join(parts))

        with tf.serve(f, port=0, name="m", params={"rest": tf.Param(bool, False)}, array="tensor") as server:
            c = tf.connect(server.address)
            self.addCleanup(c.close)
            for _ in range(3):
                self.assertEqual(bytes(c.compute("m", tf.Tensor(b"ab"))), b"ababab")
            for _ in range(2):
                call = c.call("m", {"x": tf.Tensor(b"ab")}, params={"rest": True})
                self.assertTrue(began.wait(10))
                call.cancel()
                self.assertTrue(ended.wait(2))
                began.clear()
                ended.clear()
                self.assertEqual(bytes(c.compute("m", tf.Tensor(b"ab"))), b"ababab")
        (loop,) = loops
        self.assertTrue(loop.is_closed())

        class Given(tf.Model):
            array = "tensor"

            async def compute(self, x: Any) -> Any:
                await asyncio.sleep(0)
                raise tf.ModelError("not today")

        with self.assertRaisesRegex(tf.Internal, "not today"):
            self.served(Given).compute("m", tf.Tensor(b"x"))

    def test_coroutines_wait_for_each_other(self) -> None:
        n, waiting = 8, []

        async def f(x: Any, call: Any) -> Any:
            waiting.append(call.id)
            while len(waiting) < n:
                await asyncio.sleep(0.001)
            return x

        c = self.served(f, array="tensor")
        calls = [c.call("m", {"x": tf.Tensor(b"%d" % i)}) for i in range(n)]
        self.assertEqual([bytes(call.result()["y"]) for call in calls], [b"%d" % i for i in range(n)])
        self.assertEqual(len(set(waiting)), n)

    def test_a_coroutine_is_begun_that_came_beside_the_first(self) -> None:
        begin, waiting = Worker.begin, []

        def begun(worker: Worker, block: Any) -> Any:
            if worker.loop is None:
                eventually(lambda: (worker.link.drain(), worker.link.inbox)[1])
            return begin(worker, block)

        async def f(x: Any, call: Any) -> Any:
            waiting.append(call.id)
            while len(waiting) < 2:
                await asyncio.sleep(0.001)
            return x

        with unittest.mock.patch.object(Worker, "begin", begun):
            c = self.served(f, array="tensor")
            calls = [c.call("m", {"x": tf.Tensor(b"x")}, timeout=10) for _ in range(2)]
            self.assertEqual([bytes(call.result()["y"]) for call in calls], [b"x"] * 2)

    def test_no_more_are_computed_at_a_time_than_is_said(self) -> None:
        running, lock = [0], threading.Lock()

        def counts(step: int) -> int:
            with lock:
                running[0] += step
                return running[0]

        async def coroutine(x: Any) -> Any:
            y = tf.Tensor(bytes([counts(1)]))
            await asyncio.sleep(0.01)
            counts(-1)
            return y

        def function(x: Any) -> Any:
            y = tf.Tensor(bytes([counts(1)]))
            time.sleep(0.01)
            counts(-1)
            return y

        for wait, concurrency in ((True, 3), (False, 3), (False, None)):
            c = self.served(coroutine if wait else function, array="tensor", concurrency=concurrency)
            for call in [c.call("m", {"x": tf.Tensor(b"x")}) for _ in range(12)]:
                self.assertLessEqual(bytes(call.result()["y"])[0], concurrency or 1)

    def test_threads_wait_for_each_other(self) -> None:
        barrier = threading.Barrier(3)

        def f(x: Any, call: Any) -> Any:
            y = call.empty(x.shape, "uint8")
            barrier.wait(10)
            y.data[:] = bytes(x.data)
            if bytes(x.data) == b"2":
                raise tf.ModelError("not today")
            return y

        c = self.served(f, array="tensor", concurrency=3)
        for _ in range(5):
            calls = [c.call("m", {"x": tf.Tensor(b"%d" % i)}) for i in range(3)]
            for i, call in enumerate(calls[:2]):
                self.assertEqual(bytes(call.result()["y"]), b"%d" % i)
            with self.assertRaisesRegex(tf.Internal, "not today"):
                calls[2].result()

        class Later:
            def __init__(self, x: Any) -> None:
                self.x = x

            def __await__(self) -> Any:
                yield from asyncio.sleep(0).__await__()
                return self.x

        c = self.served(lambda x, y=None: Later(x), array="tensor", concurrency=2)
        with self.assertRaisesRegex(tf.Internal, "TypeError in the model's code"):
            c.compute("m", tf.Tensor(b"x"))
        c = self.served(lambda x, y=None: Later(x), array="tensor")
        self.assertEqual(bytes(c.compute("m", tf.Tensor(b"x"))), b"x")

    def test_a_cancelled_thread_is_heard_while_others_compute(self) -> None:
        began, go = threading.Semaphore(0), threading.Event()

        def f(x: Any, call: Any) -> Any:
            began.release()
            while not call.cancelled and not go.is_set():
                time.sleep(0.001)
            if call.cancelled:
                go.set()
            return x

        for threads in (2, 3):  # nobody reads, or another
            c = self.served(f, array="tensor", concurrency=threads)
            calls = [c.call("m", {"x": tf.Tensor(b"x")}) for _ in range(2)]
            for _ in calls:
                self.assertTrue(began.acquire(timeout=10))
            calls[0].cancel()
            self.assertEqual(bytes(calls[1].result()["y"]), b"x")
            go.clear()

    def test_each_coroutine_ends_with_its_own_error(self) -> None:
        began, ended, go = threading.Semaphore(0), [], threading.Event()

        async def f(x: Any, call: Any) -> Any:
            what = bytes(x.data)
            began.release()
            try:
                while not go.is_set():
                    await asyncio.sleep(0.001)
                if what == b"public":
                    raise tf.ModelError("no such weather")
                if what == b"bug":
                    raise KeyError
                if what == b"cancelled":
                    raise asyncio.CancelledError
            finally:
                ended.append(what)
            y = call.empty(x.shape, "uint8")
            y.data[:] = what
            return y

        with tf.serve(f, port=0, name="m", array="tensor") as server:
            c = tf.connect(server.address)
            self.addCleanup(c.close)
            says = (b"good", b"public", b"bug", b"cancelled", b"late", b"given up")
            calls = {what: c.call("m", {"x": tf.Tensor(what)}, timeout=1 if what == b"late" else None) for what in says}
            for _ in calls:
                self.assertTrue(began.acquire(timeout=10))
            calls[b"given up"].cancel()
            with self.assertRaises(tf.DeadlineExceeded):
                calls[b"late"].result()
            eventually(lambda: len(ended) == 2)
            self.assertEqual(set(ended), {b"late", b"given up"})
            go.set()
            self.assertEqual(bytes(calls[b"good"].result()["y"]), b"good")
            for what, error in {
                b"public": "no such weather", b"bug": "KeyError in the model's code", b"cancelled": "the model was cancelled"
            }.items():  # fmt: skip
                with self.assertRaisesRegex(tf.Internal, error):
                    calls[what].result()
            with self.assertRaises(tf.Cancelled):
                calls[b"given up"].result()

    def test_coroutines_have_a_call_each_and_one_of_a_sequence_at_a_time(self) -> None:
        seen: dict[str, list[Any]] = {}

        async def f(x: Any, call: Any) -> Any:
            row = call.row
            n = call.state["n"] = call.state.get("n", 0) + call.rows
            seen.setdefault(call.id, []).append(row)
            await asyncio.sleep(0.001 * (row % 3))
            self.assertEqual(call.row, row)
            if call.max_rows:
                self.assertEqual(call.state["n"], n)
            return x

        c = self.served(f, array="tensor", rows=1, block_rows=2, inputs={"x": "uint8"})
        x = tf.Tensor(pattern(24))
        call = c.call("m", {"x": x})
        with c.sequence("m", max_rows=48) as one, c.sequence("m", max_rows=48) as two:
            for _ in range(2):
                for s in (one, two):
                    self.assertEqual(bytes(s.step(x)), pattern(24))
        self.assertEqual(bytes(call.result()["y"]), pattern(24))
        rows = sorted(seen.values(), key=len)
        self.assertEqual(sorted(rows[0]), list(range(0, 24, 2)))
        self.assertEqual(rows[1:], [list(range(0, 48, 2))] * 2)

    def test_a_server_that_closes_lets_coroutines_end(self) -> None:
        began = threading.Semaphore(0)

        async def f(x: Any) -> Any:
            began.release()
            await asyncio.sleep(0.3)
            return x

        with tf.serve(f, port=0, name="m", array="tensor") as server:
            c = tf.connect(server.address)
            self.addCleanup(c.close)
            calls = [c.call("m", {"x": tf.Tensor(b"x")}) for _ in range(3)]
            for _ in calls:
                self.assertTrue(began.acquire(timeout=10))
        for call in calls:
            self.assertEqual(bytes(call.result()["y"]), b"x")

    def test_a_server_does_not_need_somewhere_to_log(self) -> None:
        closed, full = io.StringIO(), unittest.mock.Mock()
        closed.close()
        full.write.side_effect = OSError("no space")

        def fails(x: Any) -> Any:
            raise KeyError("secret")

        for stderr in (None, closed, full):
            with unittest.mock.patch.object(sys, "stderr", stderr):
                server = tf.serve(fails, port=0, name="m", array="tensor")
                with tf.connect(server.address) as c:
                    for _ in range(4):
                        with self.assertRaisesRegex(tf.Internal, "KeyError"):
                            c.compute("m", tf.Tensor(b"x"))
                    eventually(lambda server=server: server._dropped >= 1)
            with unittest.mock.patch.object(sys, "stderr", io.StringIO()) as log:
                server._write("again\n")
                self.assertRegex(log.getvalue(), r"^tensorferry: \d+ lines of .* could not be written\nagain\n$")
            server.close()
            self.assertEqual(server._process.returncode, 0)

    def test_a_server_is_closed_once(self) -> None:
        server = tf.serve(lambda x: x, port=0, name="m", array="tensor")
        for _ in range(2):
            server.close()
        self.assertEqual(server._process.returncode, 0)
        with self.assertRaises(tf.Unavailable), tf.connect(server.address) as c:
            c.compute("m", b"x", timeout=5)

    def test_a_call_that_nobody_wants_does_not_end_the_server(self) -> None:
        def busy(x: Any) -> Any:
            time.sleep(4 if bytes(x.data) == b"slow" else 0)
            return x

        with tf.serve(busy, port=0, array="tensor") as server, tf.connect(server.address, retry="fixed") as c:
            with self.assertRaises(tf.DeadlineExceeded):
                c.compute("busy", b"slow", timeout=0.2)
            self.assertEqual(bytes(c.compute("busy", b"quick").data), b"quick")

    def test_set_up_and_tear_down_run_once(self) -> None:
        done: list[str] = []

        class Given(tf.Model):
            array = "tensor"

            def setup(self) -> None:
                done.append("up")

            def compute(self, x: Any) -> Any:
                done.append("compute")
                return x

            def teardown(self) -> None:
                done.append("down")

        with tf.serve(Given, port=0) as server, tf.connect(server.address) as c:
            c.compute("Given", tf.Tensor(b"x"))
        self.assertEqual(done, ["up", "compute", "down"])

    def test_a_model_that_does_not_load_is_its_own_exception(self) -> None:
        before = descriptors()

        def make() -> Any:
            raise RuntimeError("no weights here")

        for _ in range(3):
            with self.assertRaisesRegex(RuntimeError, "no weights here"):
                tf.serve(make, port=0)
        self.assertLessEqual(descriptors(), before + 1)

    def test_results_of_the_wrong_kind_or_number_are_errors(self) -> None:
        c = self.served(lambda x: None, array="tensor")
        with self.assertRaisesRegex(tf.Internal, "TypeError"):
            c.compute("m", tf.Tensor(b"x"))

    def test_ctrl_c_ends_a_served_script(self) -> None:
        code = "import tensorferry as tf\ns = tf.serve(lambda x: x, 0, name='m')\nprint(s.address, flush=True)\ns.wait()\nprint('ended')"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
        assert p.stdout is not None
        self.assertIn(":", p.stdout.readline())
        time.sleep(0.3)  # it is about to wait
        p.send_signal(signal.SIGINT)
        said, _ = p.communicate(timeout=30)
        self.assertEqual((said, p.returncode), ("ended\n", 0))

    @needs_numpy
    def test_numpy_in_and_out(self) -> None:
        def f(x: Any, k: Any, call: Any) -> Any:
            assert x.flags.writeable and not k.flags.writeable
            y = call.empty(x.shape, "float32")
            numpy.add(x, k, out=y)
            x *= 2
            return {"sum": y, "twice": x, "turned": x[:, ::-1], "first": x[:, :1]}

        c = self.served(
            f, rows=1, block_rows=7, inputs={"x": ("float32", [-1, 5]), "k": tf.Port(("float32",), (5,), whole=True)},
            outputs=dict.fromkeys(("sum", "twice", "turned", "first"), "float32"),
        )  # fmt: skip
        x, k = numpy.arange(500, dtype="f4").reshape(100, 5), numpy.arange(5, dtype="f4")
        y = c.call("m", {"x": x, "k": k}).result()
        for name, want in {"sum": x + k, "twice": 2 * x, "turned": 2 * x[:, ::-1], "first": 2 * x[:, :1]}.items():
            numpy.testing.assert_array_equal(y[name], want)

    @needs_numpy
    def test_every_data_type_comes_back(self) -> None:
        from tensorferry._tensor import NAMES, NUMBERS, WIDTHS

        c = self.served(lambda x: x + 0 if x.dtype.kind in "iuf" and x.dtype.itemsize > 1 else x.copy())
        for name in NAMES[1:]:
            data = pattern(24 * WIDTHS[NUMBERS[name]]) if name != "bool" else bytes([0, 1] * 12)
            if name in ("float16", "float32", "float64", "bfloat16"):
                data = bytes(len(data))  # no NaN
            y = c.compute("m", tf.Tensor(data, (2, 12), name))
            self.assertEqual(bytes(y.data), data, name)

    @needs_numpy
    def test_numbers_and_big_endian_arrays_are_results(self) -> None:
        c = self.served(lambda x: (2.5, x.astype(">i4")), outputs=["a", "b"])
        y = c.call("m", {"x": numpy.arange(3)}).result()
        self.assertEqual(float(y["a"]), 2.5)
        numpy.testing.assert_array_equal(y["b"], [0, 1, 2])

    @needs_torch
    def test_a_module_computes_as_it_does_here(self) -> None:
        torch.manual_seed(1)
        net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )
        c = self.served(net, rows=1, block_rows=16, device="cpu")
        x = torch.randn(50, 8)
        with torch.no_grad():
            want = net.eval()(x)
        self.assertTrue(torch.allclose(c.compute("m", x), want, atol=1e-6))
        self.assertEqual(prepare(net).about["parameters"], str(sum(p.numel() for p in net.parameters())))

    @needs_torch
    def test_a_compiled_module_takes_what_the_module_takes(self) -> None:
        class Compiled(torch.nn.Module):  # as torch.compile makes it
            def __init__(self, module: Any) -> None:
                super().__init__()
                self._orig_mod = module

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return self._orig_mod(*args, **kwargs)

        bilinear = torch.nn.Bilinear(3, 4, 2)
        self.assertEqual(list(prepare(Compiled(bilinear)).inputs), list(prepare(bilinear).inputs))
        net = torch.nn.Sequential(torch.nn.Linear(8, 3))
        c = self.served(Compiled(net), rows=1, device="cpu")
        x = torch.randn(5, 8)
        with torch.no_grad():
            self.assertTrue(torch.allclose(c.compute("m", x), net(x), atol=1e-6))

    @needs_torch
    def test_the_programs_module_stays_as_it_is(self) -> None:
        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = self.again = torch.nn.Linear(4, 4)
                self.norm, self.drop = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
                self.hidden = [torch.nn.Linear(4, 4)]  # of which torch does not know
                self.bound, self.closed = self.dropped, lambda x: self.drop(x) + 0
                self.lock, self.mask, self.seen = threading.Lock(), None, []

            def dropped(self, x: Any) -> Any:
                return self.drop(x)

            def forward(self, x: Any) -> Any:
                if self.mask is None:
                    self.mask = torch.ones(4)
                self.seen.append(len(x))
                return self.hidden[0](self.closed(self.bound(self.norm(self.first(x))))) * self.mask

        net = Net().train()
        net.norm.eval()
        modes = [m.training for m in net.modules()]
        before = {name: x.clone() for name, x in net.state_dict().items()}
        c = self.served(net, device="cpu")
        x = torch.randn(8, 4)
        y = c.compute("m", x)
        self.assertEqual([m.training for m in net.modules()], modes)
        net.train()
        self.assertTrue(torch.equal(c.compute("m", x), y))
        self.assertTrue(all(torch.equal(x, before[name]) for name, x in net.state_dict().items()))
        self.assertEqual((net.mask, net.seen), (None, []))
        net(x).sum().backward()  # nothing here was made in inference mode

        optimizer = torch.optim.SGD([*net.parameters(), *net.hidden[0].parameters()], lr=0.1)
        optimizer.step()  # it is seen there
        with torch.no_grad():
            self.assertTrue(torch.allclose(c.compute("m", x), net.eval()(x), atol=1e-6))

    @needs_torch
    def test_a_module_that_caches_in_a_request_trains_there(self) -> None:
        class Cached(torch.nn.Module):
            cache: Any = {}  # of the class: a request and the program share it

            def forward(self, x: Any) -> Any:
                return x * self.cache.setdefault("mask", torch.ones(4))

        c = self.served(Cached(), device="cpu")
        c.compute("m", torch.ones(2, 4))
        Cached()(torch.ones(2, 4, requires_grad=True)).sum().backward()

    @needs_torch
    def test_modules_of_other_makers_are_served_in_eval_mode(self) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        made = {"script": torch.jit.script(net), "fx": torch.fx.symbolic_trace(net)}
        if sys.version_info < (3, 12) and hasattr(torch, "compile"):
            made["compile"] = torch.compile(net, backend="eager")
        x = torch.randn(8, 4)
        for name, theirs in made.items():
            with self.subTest(name):
                own = prepare(theirs, {"device": "cpu"}).compute
                with torch.no_grad():
                    self.assertTrue(torch.equal(own(x), net[0](x)))
                self.assertTrue(all(m.training for m in theirs.modules()))
                self.assertEqual([p.data_ptr() for p in own.parameters()], [p.data_ptr() for p in theirs.parameters()])

    @needs_torch
    def test_a_module_on_another_device_stays_there(self) -> None:
        net = torch.nn.LSTM(4, 4)
        own = prepare(net, {"device": "meta"}).compute
        self.assertTrue(all(p.is_meta and isinstance(p, torch.nn.Parameter) for p in own.parameters()))
        self.assertIs(own._flat_weights[0], own.weight_ih_l0)
        self.assertFalse(any(p.is_meta for p in net.parameters()))

    @needs_torch
    def test_in_place_operations_and_views_of_torch_are_results(self) -> None:
        c = self.served(lambda x: (x.relu_(), x.t()), outputs=["a", "b"], array="torch", device="cpu")
        x = torch.arange(-6.0, 6).reshape(3, 4)
        y = c.call("m", {"x": x}).result()
        self.assertTrue(torch.equal(y["a"], x.relu()) and torch.equal(y["b"], x.relu().t()))


if __name__ == "__main__":
    unittest.main()
