"""A torch model on a GPU: copies overlap what is computed. torch and the GPU are stand-ins, in gpu.py."""

from __future__ import annotations

import array
import contextlib
import gc
import io
import itertools
import mmap
import os
import queue
import socket
import sys
import threading
import unittest
import unittest.mock
from typing import Any, Callable, Optional

import tensorferry as tf
from gpu import WAIT, Gpu
from support import pattern, program
from tensorferry import _tensor
from tensorferry import _wire as wire
from tensorferry._device import BLOCKS
from tensorferry._model import prepare
from tensorferry._version import PROGRAM_VERSION
from tensorferry._worker import Worker, load

SIZE = 64  # bytes of a block
PLACE = 4096  # bytes: there are PLACES of them in memory 1, of inputs, and in memory 2, of results
PLACES = 16
# Which of the streams do at once what they are given.
EAGER = [" ".join(names) for n in range(4) for names in itertools.combinations(("into", "main", "back"), n)]


def plus(n: int) -> Callable[[int], int]:
    return lambda b: (b + n) & 255


class Host:
    """The other end of a worker's link. A thread reads it: what it answers is seen, and written over, at once."""

    def __init__(self, test: unittest.TestCase, gpu: Gpu, model: Any, idle: bool = False) -> None:
        self.gpu = gpu
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hello = {"link": wire.LINK, "version": PROGRAM_VERSION, "memory": 1 << 20}
        self.sock.send(wire.encode(wire.HELLO, json=wire.to_json(hello)))
        self.memory = {id: self.share(id) for id in (1, 2)}
        self.ready: dict[str, Any] = {}
        self.message = ""  # of the last failure
        self.given: list[Any] = []  # that did not come back
        self.answers: queue.Queue[tuple[int, Optional[bytes]]] = queue.Queue()
        self.worker = Worker(theirs)
        self.model = load(self.worker, model, {"array": "torch", "device": "cuda", "rows": 1})
        self.device = self.worker.device
        assert self.device is not None
        if not idle:  # as if there were another block
            self.device.idle = lambda: False  # type: ignore[method-assign]
        self.begun, follow = threading.Semaphore(0), self.device.follow
        self.device.follow = lambda block: (follow(block), self.begun.release())  # type: ignore[assignment,func-returns-value]
        self.threads = [threading.Thread(target=f) for f in (self.read, self.serve)]
        for thread in self.threads:
            thread.start()
        test.addCleanup(self.end)

    def share(self, id: int) -> mmap.mmap:
        fd = os.memfd_create("memory")
        os.truncate(fd, PLACES * PLACE)
        memory = wire.encode(wire.MEMORY, id, bytes=PLACES * PLACE)
        self.sock.sendmsg([memory], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        mapped = mmap.mmap(fd, PLACES * PLACE)
        os.close(fd)
        return mapped

    def serve(self) -> None:
        self.worker.serve(self.model)
        self.worker.link.close()

    def end(self) -> None:
        self.gpu.gate.set()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        for thread in (*self.threads, self.device.thread):
            thread.join(WAIT)
            assert not thread.is_alive()
        self.sock.close()
        assert not self.gpu.early

    def read(self) -> None:
        places = itertools.cycle(range(PLACES))
        while packet := self.sock.recv(wire.PACKET_BYTES):
            m = wire.decode(packet)
            if m["kind"] == wire.TAKE:
                self.given.append(wire.Extent(2, next(places) * PLACE, PLACE))
                self.sock.send(wire.encode(wire.GIVE, m["id"], ranges=self.given[-1:]))
            elif m["kind"] == wire.GIVE:
                for extent in m["ranges"]:
                    self.given.remove(extent)
            elif m["kind"] == wire.READY:
                self.ready = wire.from_json(m["json"])
            elif m["kind"] == wire.ANSWER:
                self.answers.put((m["id"], self.result(m)))

    def result(self, answer: dict[str, Any]) -> Optional[bytes]:
        """The bytes of an answer. Its memory and that of its input are another's then."""
        self.leave(1, answer["id"] % PLACES * PLACE)
        if answer["code"]:
            self.message = wire.from_json(answer["json"])["message"]
            return None
        (output,) = answer["outputs"]
        _, at, n = output["range"]
        self.given.remove((2, at, PLACE))
        result = bytes(self.memory[2][at : at + n])
        self.leave(2, at)
        return result

    def leave(self, memory: int, at: int) -> None:
        self.gpu.leave(self.worker.link.memories[memory].base + at, PLACE)
        self.memory[memory][at : at + PLACE] = b"\xdd" * PLACE

    def run(self, id: int, data: bytes) -> None:
        at = id % PLACES * PLACE
        self.memory[1][at : at + len(data)] = data
        placed = {"dtype": 6, "shape": (len(data),), "range": wire.Extent(1, at, len(data))}
        self.sock.send(wire.encode(wire.RUN, id, run=1, rows=len(data), inputs=[placed], json=b"{}"))

    def answer(self) -> tuple[int, Optional[bytes]]:
        return self.answers.get(timeout=WAIT)

    def begin(self, blocks: dict[int, bytes]) -> None:
        """Has blocks begun, while none is waited for."""
        self.gpu.gate.clear()
        for id, data in blocks.items():
            self.run(id, data)
        for _ in blocks:
            assert self.begun.acquire(timeout=WAIT)

    def compute(self, f: Callable[[int], int]) -> None:
        """Has blocks computed, as many at a time as the worker takes."""
        for id in range(1, 4 * BLOCKS, BLOCKS):
            blocks = {n: bytes((b + n) & 255 for b in pattern(SIZE)) for n in range(id, id + BLOCKS)}
            self.begin(blocks)
            self.gpu.gate.set()
            for n, data in blocks.items():
                got, want = self.answer(), (n, bytes(map(f, data)))
                assert got == want, (got, want)


class Overlap(unittest.TestCase):
    def gpu(self, eager: str = "") -> Gpu:
        gpu = Gpu(_tensor.address_of, eager)
        patch = unittest.mock.patch.dict(sys.modules, torch=gpu.torch())
        patch.start()
        self.addCleanup(patch.stop)
        return gpu

    def test_all_bytes_are_right_however_the_streams_run(self) -> None:
        for eager in EAGER:
            with self.subTest(eager=eager):
                Host(self, self.gpu(eager), lambda x: x.map(plus(1))).compute(plus(1))

    def test_a_model_may_return_the_same_memory_for_each_block(self) -> None:
        for eager in EAGER:
            with self.subTest(eager=eager):
                gpu = self.gpu(eager)
                y = gpu.empty((SIZE,), SIZE)
                Host(self, gpu, lambda x, y=y: x.map(plus(1), y)).compute(plus(1))

    def test_a_model_may_keep_its_input(self) -> None:
        for eager in EAGER:
            kept: list[Any] = []

            def model(x: Any, kept: list[Any] = kept) -> Any:
                kept.append(x)
                return kept.pop(0).map(plus(0)) if len(kept) > 1 else x.map(plus(0))

            with self.subTest(eager=eager):
                host = Host(self, self.gpu(eager), model)
                for id in (1, 4, 7):
                    host.begin({n: bytes([n]) * SIZE for n in range(id, id + 3)})
                    host.gpu.gate.set()
                    got = [host.answer() for _ in range(3)]
                    self.assertEqual(got, [(n, bytes([max(1, n - 1)]) * SIZE) for n in range(id, id + 3)])

    def test_a_model_may_write_to_memory_of_the_link(self) -> None:
        def model(x: Any, call: Any) -> Any:
            y = call.empty(x.shape, "uint8")
            y.copy_(x.map(plus(1)), non_blocking=True)
            return y

        for eager in EAGER:
            with self.subTest(eager=eager):
                Host(self, self.gpu(eager), model).compute(plus(1))

    def test_nothing_waits_but_for_what_it_needs(self) -> None:
        for eager, ran in {
            "into back": ["into"] * 3, "into main": ["into", "main", "main"] * 3,
            "into main back": ["into", "main", "main", "back"] * 3,
        }.items():  # fmt: skip
            with self.subTest(eager=eager):
                gpu = self.gpu(eager)
                host = Host(self, gpu, lambda x: x.map(plus(1)))
                host.begin({n: bytes([n]) * SIZE for n in (1, 2, 3)})
                self.assertEqual(gpu.ran, ran)
                self.assertTrue(host.answers.empty())
                self.assertEqual(host.ready["blocks"], BLOCKS)
                gpu.gate.set()
                self.assertEqual([host.answer() for _ in range(3)], [(n, bytes([n + 1]) * SIZE) for n in (1, 2, 3)])

    def test_a_block_that_is_alone_takes_one_stream_and_one_synchronization(self) -> None:
        for eager in EAGER:
            with self.subTest(eager=eager):
                gpu = self.gpu(eager)
                host = Host(self, gpu, lambda x: x.map(plus(1)), idle=True)
                for id in range(1, 2 * PLACES):
                    host.run(id, bytes([id]) * SIZE)
                    self.assertEqual(host.answer(), (id, bytes([id + 1]) * SIZE))
                self.assertEqual((set(gpu.ran), gpu.synchronized), ({"main"}, 2 * PLACES - 1))
                gpu.lost = True
                host.run(99, bytes(SIZE))
                self.assertEqual(host.answer(), (99, None))

    def test_a_block_behind_one_that_was_alone_is_not(self) -> None:
        gpu, began, go = self.gpu(), threading.Event(), threading.Event()

        def model(x: Any) -> Any:
            began.set()
            self.assertTrue(go.wait(WAIT))
            return x.map(plus(1))

        host = Host(self, gpu, model, idle=True)
        host.run(1, bytes(SIZE))
        self.assertTrue(began.wait(WAIT))
        for id in (2, 3):
            host.run(id, bytes(SIZE))
        go.set()
        self.assertEqual([host.answer() for _ in range(3)], [(id, b"\1" * SIZE) for id in (1, 2, 3)])
        self.assertEqual(gpu.ran[:4], ["main", "main", "main", "into"])

    def test_a_failure_is_that_of_its_block_and_is_answered_after_its_copies(self) -> None:
        def model(x: Any) -> Any:
            if x.shape == (1,):
                raise tf.ModelError("no such weather")
            return x.map(plus(1))

        for eager in EAGER:
            with self.subTest(eager=eager):
                host = Host(self, self.gpu(eager), model)
                host.begin({1: b"a" * SIZE, 2: b"b", 3: b"c" * SIZE})
                self.assertTrue(host.answers.empty())
                host.gpu.gate.set()
                self.assertEqual([host.answer() for _ in range(3)], [(1, b"b" * SIZE), (2, None), (3, b"d" * SIZE)])
                self.assertEqual(host.message, "no such weather")

    def test_what_a_kernel_breaks_fails_its_block_and_those_after_it(self) -> None:
        gpu = self.gpu()

        def model(x: Any) -> Any:
            def kernel(b: int) -> int:
                if b == 2:
                    gpu.lost = True
                    raise RuntimeError("CUDA error: an illegal memory access")
                return b

            return x.map(kernel)

        host = Host(self, gpu, model)
        host.begin({n: bytes([n]) * SIZE for n in (1, 2, 3)})
        gpu.gate.set()
        self.assertEqual([host.answer() for _ in range(3)], [(1, b"\1" * SIZE), (2, None), (3, None)])
        self.assertIn("RuntimeError in the model's code", host.message)
        for id in (4, 5):  # nothing is begun any more
            host.run(id, b"\4")
            self.assertEqual(host.answer(), (id, None))
        gc.collect()
        host.worker.link.trim()
        host.end()
        self.assertEqual(host.given, [])

    def test_a_device_that_is_lost_before_the_last_copy_fails_the_block(self) -> None:
        gpu = self.gpu()
        host = Host(self, gpu, lambda x: x.map(plus(1)))
        follow = host.device.follow

        def lose(block: Any) -> None:
            gpu.lost = True  # the model has computed, and the copy of its result is begun
            follow(block)

        host.device.follow = lose  # type: ignore[method-assign]
        host.run(1, bytes(SIZE))
        self.assertEqual(host.answer(), (1, None))
        self.assertIn("RuntimeError", host.message)

    def test_a_block_is_not_computed_that_was_cancelled_while_it_waited(self) -> None:
        gpu, computed, go = self.gpu(), [], threading.Event()

        def model(x: Any) -> Any:
            computed.append(x.shape[0])
            self.assertTrue(go.wait(WAIT))
            return x.map(plus(1))

        host = Host(self, gpu, model)
        host.run(1, b"a")
        host.run(2, b"bb")
        host.sock.send(wire.encode(wire.CANCEL, 2))
        host.run(3, b"ccc")
        go.set()
        self.assertEqual([host.answer() for _ in range(3)], [(1, b"b"), (2, None), (3, b"ddd")])
        self.assertEqual(computed, [1, 3])

    def test_memory_stays_registered_until_the_last_copy(self) -> None:
        gpu = self.gpu()
        host = Host(self, gpu, lambda x: x.map(plus(1)))
        host.begin({1: bytes(SIZE)})
        for id in (1, 2):
            host.sock.send(wire.encode(wire.FORGET, id))
        host.sock.shutdown(socket.SHUT_WR)
        host.threads[1].join(0.2)
        self.assertTrue(host.threads[1].is_alive(), "it waits for the copy")
        self.assertEqual(sorted(gpu.registered.values()), [PLACES * PLACE] * 2)
        gpu.gate.set()
        host.end()
        gc.collect()
        self.assertEqual(host.memory[2][:SIZE], b"\1" * SIZE)
        self.assertEqual((gpu.registered, gpu.early), ({}, []))

    def test_a_refused_registration_is_said_once(self) -> None:
        gpu, said = self.gpu(), io.StringIO()
        gpu.refuses = 801
        with contextlib.redirect_stdout(said):
            host = Host(self, gpu, lambda x: x.map(plus(1)))
            host.compute(plus(1))
        self.assertEqual(said.getvalue().count("CUDA error 801"), 1)

    def test_what_is_not_on_the_device_is_copied_at_once(self) -> None:
        gpu = self.gpu()

        def model(x: Any) -> Any:
            y = x.map(plus(1))
            y.device = type(y.device)("cuda:1")
            gpu.other.wait_stream(gpu.now())
            return y

        Host(self, gpu, model).compute(plus(1))
        Host(self, self.gpu(), lambda x: bytes(SIZE)).compute(lambda b: 0)

    def test_a_model_that_trains_computes_as_ever(self) -> None:
        self.gpu()
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(theirs.close)
        hello = {"link": wire.LINK, "version": PROGRAM_VERSION}
        theirs.send(wire.encode(wire.HELLO, json=wire.to_json(hello)))
        model = prepare(lambda x: x, {"array": "torch", "device": "cuda"})
        model.training = "some"
        worker = Worker(ours)
        self.addCleanup(worker.link.close)
        with unittest.mock.patch("tensorferry._worker.prepare", return_value=model):
            load(worker, None)
        self.assertIsNone(worker.device)

    def test_through_a_server(self) -> None:
        program()
        for eager in ("", "into main back"):
            gpu = self.gpu(eager)
            with tf.serve(
                lambda x: x.map(plus(1)), port=0, name="m", array="torch", device="cuda", rows=1, block_rows=100
            ) as server, tf.connect(server.address) as client:  # fmt: skip
                data = pattern(100_000)
                self.assertEqual(bytes(client.compute("m", tf.Tensor(data)).data), bytes(map(plus(1), data)))
            gc.collect()
            self.assertEqual((gpu.registered, gpu.early), ({}, []))


if __name__ == "__main__":
    unittest.main()
