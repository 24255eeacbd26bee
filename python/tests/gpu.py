"""Stands in for torch and a GPU. What is begun on a stream runs as late as it may, or as soon, and so do frees.

A stream in Gpu.eager runs what it is given as soon as what it waits for has run; another only what somebody
waits for. Whatever is not ordered runs in the wrong order with one choice of Gpu.eager or another, and its bytes are wrong.
"""

from __future__ import annotations

import contextlib
import math
import threading
import types
from typing import Any, Callable, Optional

WAIT = 10.0  # seconds, for what happens at once


class Device:
    def __init__(self, name: Any) -> None:
        self.type, self.name = str(name).partition(":")[0], str(name)

    def __eq__(self, other: object) -> bool:
        return str(other) == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


class Node:
    """Something that a stream is to do, after others."""

    def __init__(self, after: list[Node], do: Callable[[], object], touches: Optional[tuple[int, int]] = None) -> None:
        self.after, self.do, self.touches, self.ran = after, do, touches, False


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.tail = Node([], lambda: None)
        self.tail.ran = True
        self.free: dict[int, list[bytearray]] = {}  # by length

    def do(self, do: Callable[[], object], touches: Optional[tuple[int, int]] = None) -> None:
        self.gpu.add(self, Node([self.tail], lambda: (self.gpu.ran.append(self.name), do()), touches))

    def wait_stream(self, other: Stream) -> None:
        self.gpu.add(self, Node([self.tail, other.tail], lambda: None))

    def synchronize(self) -> None:
        assert self.gpu.gate.wait(WAIT), "the gate stays shut"
        self.gpu.synchronized += 1
        self.gpu.run(self.tail)

    def record_event(self, event: Event) -> Event:
        if self.gpu.lost:
            raise RuntimeError("CUDA error: the context is lost")
        event.node = self.tail
        return event


class Event:
    def __init__(self, gpu: Gpu, blocking: bool = False) -> None:
        assert blocking, "an event that is waited for in a loop"
        self.gpu, self.node = gpu, Node([], lambda: None)

    def synchronize(self) -> None:
        assert self.gpu.gate.wait(WAIT), "the gate stays shut"
        self.gpu.run(self.node)


class Tensor:
    """Bytes on the device, or in memory of others."""

    def __init__(self, gpu: Gpu, device: Device, shape: tuple[int, ...], data: Any, stream: Optional[Stream] = None):
        self.gpu, self.device, self.shape, self.data, self.stream = gpu, device, tuple(shape), data, stream
        self.dtype, self.layout, self.used_by = "uint8", "torch.strided", []

    def __del__(self) -> None:
        if self.stream is not None:
            self.gpu.release(self.stream, self.data, [s.tail for s in self.used_by])

    def view(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(self.gpu, self.device, shape, self.data)

    def numel(self) -> int:
        return len(self.data)

    def untyped_storage(self) -> Any:
        return types.SimpleNamespace(nbytes=self.numel)

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    element_size = staticmethod(lambda: 1)
    storage_offset = staticmethod(lambda: 0)
    is_contiguous = staticmethod(lambda: True)
    is_conj = is_neg = staticmethod(lambda: False)

    def data_ptr(self) -> int:
        return self.gpu.address_of(self.data)

    def on_device(self) -> Tensor:
        made = self.gpu.empty(self.shape, len(self.data))
        made.device = self.device if self.device.type == "cuda" else made.device
        return made

    def to(self, device: Any, non_blocking: bool = False) -> Tensor:
        assert self.device.type == "cpu" and non_blocking
        made = self.on_device()
        made.copy_(self, non_blocking=True)
        return made

    def clone(self, memory_format: str) -> Tensor:
        assert memory_format == "dense"
        made = self.on_device()
        made.copy_(self, non_blocking=True)
        return made

    def map(self, f: Callable[[int], int], out: Optional[Tensor] = None) -> Tensor:
        """What a model computes."""
        made = out or self.on_device()
        source, to = self.data, made.data

        def do() -> None:
            to[:] = bytes(f(b) for b in source)

        self.gpu.now().do(do)
        return made

    def copy_(self, other: Tensor, non_blocking: bool = False) -> None:
        to, source = self.data, other.data
        touches = [(t.data_ptr(), len(t.data)) for t in (self, other) if t.device.type == "cpu" and len(t.data)]

        def do() -> None:
            to[:] = bytes(source)

        stream = self.gpu.other if "cuda:1" in (self.device, other.device) else self.gpu.now()
        stream.do(do, touches[0] if touches else None)
        if not non_blocking:
            self.gpu.run(stream.tail)

    def record_stream(self, stream: Stream) -> None:
        self.used_by.append(stream)


class Gpu:
    def __init__(self, address_of: Callable[[Any], int], eager: str = "") -> None:
        self.address_of, self.eager, self.lost = address_of, eager, False
        self.lock = threading.RLock()
        self.gate = threading.Event()
        self.gate.set()
        self.nodes: list[tuple[Stream, Node]] = []
        self.late: list[tuple[Stream, bytearray, list[Node]]] = []  # free when nodes have run
        self.ran: list[str] = []  # on which streams
        self.main, self.other = Stream(self, "main"), Stream(self, "of another device")
        self.names = iter(("into", "back"))
        self.current = threading.local()
        self.registered: dict[int, int] = {}
        self.early: list[Node] = []  # copies whose memory became another's before they ran
        self.refuses = 0
        self.synchronized = 0  # how often a stream was

    def torch(self) -> Any:
        cuda = types.SimpleNamespace(
            Stream=lambda device: Stream(self, next(self.names)),
            Event=lambda blocking: Event(self, blocking),
            current_stream=lambda device: self.now(),
            stream=self.on,
            cudart=lambda: self,
            is_available=lambda: True,
        )
        return types.SimpleNamespace(
            cuda=cuda, Tensor=Tensor, uint8="uint8", contiguous_format="dense", device=Device,
            nn=types.SimpleNamespace(Module=type("Module", (), {})),
            no_grad=contextlib.nullcontext, get_num_threads=lambda: 1, set_num_threads=lambda n: None,
            frombuffer=lambda buffer, dtype: Tensor(self, Device("cpu"), (len(buffer),), memoryview(buffer).cast("B")),
            empty=lambda shape, dtype: Tensor(self, Device("cpu"), shape, memoryview(bytearray())),
        )  # fmt: skip

    def now(self) -> Stream:
        return getattr(self.current, "stream", self.main)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Any:
        before, self.current.stream = self.now(), stream
        try:
            yield
        finally:
            self.current.stream = before

    def empty(self, shape: tuple[int, ...], n: int) -> Tensor:
        """Memory of the current stream, which has it at once when it is free: what the stream did before comes before."""
        if self.lost:
            raise RuntimeError("CUDA error: the context is lost")
        stream = self.now()
        with self.lock:
            for entry in [e for e in self.late if all(node.ran for node in e[2])]:
                self.late.remove(entry)
                self.release(entry[0], entry[1], [])
            free = stream.free.get(n)
            return Tensor(self, Device("cuda:0"), shape, free.pop() if free else bytearray(b"\xee" * n), stream)

    def release(self, stream: Stream, data: bytearray, after: list[Node]) -> None:
        with self.lock:
            if any(not node.ran for node in after):
                self.late.append((stream, data, after))
            else:
                stream.free.setdefault(len(data), []).append(data)

    def add(self, stream: Stream, node: Node) -> None:
        with self.lock:
            stream.tail = node
            self.nodes.append((stream, node))
            self.go()

    def go(self) -> None:
        for stream, node in self.nodes:
            if not node.ran and stream.name in self.eager and all(a.ran for a in node.after):
                self.run(node)

    def run(self, node: Node) -> None:
        with self.lock:
            if node.ran:
                return
            for before in node.after:
                self.run(before)
            if self.lost:
                raise RuntimeError("CUDA error: the context is lost")
            node.ran = True
            node.do()
            node.do, node.after = (lambda: None), []
            self.nodes = [n for n in self.nodes if not n[1].ran]
            self.go()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.registered
        if not self.refuses:
            self.registered[address] = size
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.leave(address, self.registered.pop(address))
        return 0

    def leave(self, address: int, size: int) -> None:
        """Memory is another's from now on: no copy may read it or write to it."""
        with self.lock:
            end = address + size
            self.early += [n for _, n in self.nodes if n.touches and address <= n.touches[0] < end and not self.lost]
