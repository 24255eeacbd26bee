"""Computes blocks of one model for a tensorferry server: the guest of docs/link.md in the role of a worker.

One thread reads, computes and answers; for a model on a GPU another answers (_device). Inputs are views of memory that
the server lends until the answer; results are copied into such memory once, or not at all where they lie there already.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import socket
import sys
import time
import traceback
from typing import Any, Callable, Optional

from . import _tensor as tensors
from . import _wire as wire
from ._device import BLOCKS, Device
from ._errors import LinkError, ResourceExhausted
from ._link import Link, Memory, Range
from ._model import Call, ModelError, Prepared, find, named_results, prepare

HELLO_SECONDS = 60.0
TAKE_SECONDS = 10.0  # how long a result waits for memory
KEPT_SHARE = 16  # between calls the worker keeps at most this part (1/16) of the link's memory for its next results
MESSAGE_CHARACTERS = 1000
TRACE_CHARACTERS = 8000  # of a traceback, for the server's log: with any escapes it fits a packet
EXHAUSTED = 8  # one of gRPC's codes
_STAND_INS = ("uint8", "uint16")  # what numpy has for data types that it lacks


@dataclasses.dataclass
class Block:
    """A block that is computed, and what it holds until its answer."""

    id: int
    begin: int  # in nanoseconds
    made: list[Range] = dataclasses.field(default_factory=list)  # for its results, by address
    named: list[Range] = dataclasses.field(default_factory=list)  # of these, what the answer names
    outputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    code: int = 0
    says: bytes = b""
    keep: list[Any] = dataclasses.field(default_factory=list)  # what copies on a device read and write
    event: Any = None  # their end

    def fail(self, err: Exception) -> None:
        self.outputs = []
        self.code, self.says = failure(err)


class Worker:
    """Serves one model over one link, from one thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.set_inheritable(False)
        self.link = Link(sock, "worker", timeout=HELLO_SECONDS)
        self.runs: dict[int, Any] = {}  # Call, or the exception that refuses it
        self.block = Block(0, 0)  # that is computed
        self.unwanted = False
        self.device: Optional[Device] = None  # of a model on a GPU that does not train
        self.pins = True  # CUDA has not refused to register memory
        self.model: Prepared  # whose block is computed
        self.models: list[Prepared] = []  # that one, and its companions
        self.training: Any = None
        self.told: Any = None  # what the server knows that training keeps
        self.loop: Any = None  # of async models

    def refuse(self, err: BaseException) -> None:
        """Says that the model does not load."""
        last = traceback.format_exception_only(type(err), err)[-1].strip()
        self.link.send(wire.encode(wire.READY, json=wire.to_json({"error": wire.words(last[:MESSAGE_CHARACTERS])})))

    def serve(self, model: Prepared) -> None:
        """Computes until the end of the link."""
        self.model, self.models, self.training = model, [model, *model.companions], model.training
        if self.training is not None:
            self.training.room = int(self.link.host.get("memory", 0)) // 2
        ready = model.ready()
        if self.device is not None:
            ready["blocks"] = BLOCKS
        device = contextlib.closing(self.device) if self.device else contextlib.nullcontext()
        with contextlib.suppress(LinkError), device:
            self.link.send(wire.encode(wire.READY, json=wire.to_json(ready)))
            while True:
                deadline = None if self.training is None else self.training.tidy()
                self.tell()
                message = self.link.receive(deadline)
                if message is None:
                    if self.link.dead is None:
                        continue
                    return
                if message["kind"] == wire.RUN:
                    self.run(message)
                elif message["kind"] == wire.END:
                    self.end(self.runs.pop(message["id"], None))
                    if not any(isinstance(call, Call) and not call.max_rows for call in self.runs.values()):
                        self.tidy()
                elif message["kind"] == wire.GONE and self.training is not None:
                    self.training.gone(message["id"])

    def end(self, call: Any) -> None:
        """Closes what a call, or a sequence, has kept."""
        for kept in {id(v): v for v in getattr(call, "state", {}).values()}.values():
            try:
                if callable(close := getattr(kept, "close", None)):
                    close()
            except Exception:
                traceback.print_exc()

    def teardown(self) -> None:
        """Ends what serve has begun."""
        for call in self.runs.values():
            self.end(call)
        if self.loop is not None:
            self.loop.close()
        if self.models:
            self.models[0].teardown()

    def tell(self) -> None:
        """Tells the server what training keeps, if that has changed."""
        kept = None if self.training is None else self.training.kept()
        if kept != self.told:
            self.told = kept
            self.link.send(wire.encode(wire.KEPT, json=wire.to_json(kept)))

    def tidy(self) -> None:
        """Gives memory back that other processes of the model may wait for."""
        link = self.link
        link.collect()
        kept = sum(r.length for ranges in link._free.values() for r in ranges)
        if kept > int(link.host.get("memory", 0)) // KEPT_SHARE:
            link.trim()

    def run(self, message: dict[str, Any]) -> None:
        block = self.block = Block(message["id"], time.perf_counter_ns())
        self.unwanted = False
        self.model = self.models[message["model"]]
        try:
            block.outputs = self.compute(block, message)
        except Exception as err:  # at the end of the link the answer says so
            block.fail(err)
        if self.device is not None:
            self.device.follow(block)
        else:
            self.answer(block, time.perf_counter_ns() - block.begin)

    def answer(self, block: Block, nanos: int) -> None:
        """Hands the results over, or says why there are none."""
        if not block.code:
            for answered in block.named:
                answered.disown()
        for held in (block.named, block.made, block.keep):
            held.clear()
        if self.training is not None and self.training.bytes > self.told["kept"]:
            self.tell()  # first: it is charged before another call is admitted
        self.link.send(
            wire.encode(
                wire.ANSWER, block.id, code=block.code, nanos=nanos, outputs=block.outputs, json=block.says
            )
        )  # fmt: skip

    def compute(self, block: Block, message: dict[str, Any]) -> list[dict[str, Any]]:
        model = self.model
        call = self.runs.get(message["run"])
        if call is None:
            call = self.runs[message["run"]] = self.begin(message)
        if isinstance(call, Exception):
            raise call
        call.row, call.rows = message["row"], message["rows"]
        if self.device is not None and self.cancelled():  # while it waited for others
            raise ModelError("the call was cancelled")
        given: dict[str, Any] = {}
        places: list[tuple[int, wire.Extent]] = []  # of inputs: results may lie there
        for (name, port), placed in zip(model.inputs.items(), message["inputs"]):
            if not placed["dtype"]:  # it was left out
                continue
            extent = placed["range"]
            buffer: Any = bytearray()
            if extent.length:
                memory = self.link.locate(extent)
                self.pin(memory)
                block.keep.append(memory)
                buffer = (ctypes.c_ubyte * extent.length).from_buffer(memory.map, extent.offset)
                places.append((memory.base + extent.offset, extent))
            like = model.like if self.device is None else model.like._replace(device=None)
            x = tensors.view(like, placed["dtype"], tuple(placed["shape"]), buffer)
            if isinstance(x, tensors.Tensor) and model.like.kind != "tensor":
                raise ModelError(f"input {name} is {x.dtype}, which this {model.like.kind} does not have")
            if model.like.kind == "numpy" and port.whole and model.rows:
                x.flags.writeable = False  # other blocks read it
            given[name] = x if self.device is None else self.device.bring(x)
        args, named = model.arguments(given)
        if model.wants_call:
            named["call"] = call
        with model.mode():
            said = model.compute(*args, **named)
            if inspect.isawaitable(said):
                said = self.finish(said)
            # All are looked at before memory is taken.
            sources = [
                self.source(name, model.outputs[name].dtypes, v) for name, v in named_results(list(model.outputs), said)
            ]
            # Where a model has rows, memory of the input is kept for a chunk of every result:
            # none may be narrower than the input.
            widest = max((e.length for _, e in places), default=0)
            if model.rows and any(0 < s.nbytes < widest for s, _ in sources):
                places = []
            outputs = [self.place(block, s, number, places) for s, number in sources]
        if call.max_rows:
            block.says = self.grown(call)
        return outputs

    def grown(self, call: Call) -> bytes:
        """What an answer says of a state, if that has grown or shrunk. To look takes a twentieth of the time."""
        begin = time.perf_counter_ns()
        if begin < call._look:
            return b""
        told, call._bytes = call._bytes, tensors.held(call.state, {id(self)})
        end = time.perf_counter_ns()
        call._look = end + 20 * (end - begin)
        return b'{"state":%d}' % call._bytes if call._bytes != told else b""

    def finish(self, said: Any) -> Any:
        """Runs what an async model returned to its end. A cancelled call cancels it."""
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        loop, task = self.loop, asyncio.ensure_future(said, loop=self.loop)

        def look() -> None:
            if self.cancelled():
                loop.remove_reader(self.link._sock)
                task.cancel()

        loop.call_soon(look)  # it may have come already
        loop.add_reader(self.link._sock, look)
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise ModelError("the model was cancelled") from None
        finally:
            loop.remove_reader(self.link._sock)

    def begin(self, message: dict[str, Any]) -> Any:
        raw = message["json"]
        if message["flags"] & wire.LONG:
            raw = self.link._long(raw)
        said = wire.from_json(raw)
        params = said.get("params") or {}
        try:
            values = {name: p.parse(name, params.get(name)) for name, p in self.model.params.items()}
        except ModelError as err:
            return err
        call = Call(str(said.get("call", "")), values, said.get("inputs") or [], self)
        call.session, call.max_rows = int(said.get("session", 0)), int(said.get("max_rows", 0))
        return call

    def source(self, name: str, declared: tuple[str, ...], value: Any) -> tuple[tensors.Source, int]:
        """A result as bytes, and the number of its data type."""
        if isinstance(value, (bool, int, float, complex, list)):
            if self.model.like.kind == "torch":
                import torch

                value = torch.as_tensor(value)
            elif self.model.like.kind == "numpy":
                import numpy

                value = numpy.asarray(value)
        source = tensors.of(value, name)
        if source.items is not None:
            raise TypeError("a Stream is no result of a model")
        dtype = tensors.NAMES[source.dtype]
        if len(declared) == 1 and dtype in _STAND_INS and dtype != declared[0]:
            number = tensors.number_of(declared[0])
            if number in tensors._BITS and tensors.WIDTHS[number] == tensors.WIDTHS[source.dtype]:
                return source, number
        return source, source.dtype

    def place(
        self, block: Block, source: tensors.Source, number: int, places: list[tuple[int, wire.Extent]]
    ) -> dict[str, Any]:
        """Says where a result lies: in the input, in a range of call.empty, or in one that it is copied to."""
        n, at, extent = source.nbytes, source.address, wire.NOWHERE
        said = {"dtype": number, "shape": source.shape}
        if n:
            for base, e in places:
                if at and base <= at and at + n <= base + e.length:
                    return {**said, "range": wire.Extent(e.memory, e.offset + at - base, n)}
            mine = next((r for r in block.made if r.address == at and r not in block.named), None)
            to = mine or self.link.take(n, TAKE_SECONDS)
            block.named.append(to)
            if mine is None:
                self.pin(to.memory)
                if self.device is None or not self.device.fetch(block, source.keep, to.address):
                    source.write(to.address)
            extent = to.extent(n)
        return {**said, "range": extent}

    def pin(self, memory: Memory) -> None:
        """Registers memory with CUDA if the model is on a GPU: its copies need no other memory then."""
        device = self.model.like.device
        if self.pins and memory.unpin is None and device is not None and str(device).startswith("cuda"):
            memory.unpin = pinned(sys.modules["torch"].cuda.cudart(), memory.base, memory.size)
            self.pins = memory.unpin is not None

    # What a Call uses.

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        number = tensors.number_of(dtype)
        whole = tensors.shape_of(shape)
        n = tensors.size_of(number, whole)
        buffer: Any = bytearray()
        if n:
            made = self.link.take(n, TAKE_SECONDS)
            self.block.made.append(made)
            buffer = made.export(n)
        return tensors.view(tensors.Like(self.model.like.kind), number, whole, buffer)

    def cancelled(self) -> bool:
        link = self.link
        if not self.unwanted:
            while link.dead is None and link._poll.poll(0):
                with link._reading:
                    link._receive(None)
            self.unwanted = link.dead is not None or any(
                m["kind"] == wire.CANCEL and m["id"] == self.block.id for m in link.inbox
            )
        return self.unwanted


def pinned(cudart: Any, address: int, size: int) -> Optional[Callable[[], object]]:
    """Page-locks memory for as long as the link knows it, and returns what undoes that; None if it is refused."""
    code = int(cudart.cudaHostRegister(address, size, 0))
    if code:
        print(f"shared memory is not page-locked: CUDA error {code} for {size} bytes; copies to the GPU are slower")
        return None
    return lambda: cudart.cudaHostUnregister(address)


def failure(err: Exception) -> tuple[int, bytes]:
    """What an answer says of an exception: its code, and what the caller reads and the server logs."""
    code, message = (
        ModelError.code,
        f"{type(err).__name__} in the model's code; the server has the cause under the call's id",
    )
    trace = "".join(traceback.format_exception(type(err), err, err.__traceback__))
    if isinstance(err, ResourceExhausted):
        code, message = EXHAUSTED, str(err)
    elif getattr(err, "public", False) is True:
        code, message, trace = (err.code if isinstance(err, ModelError) else code), str(err), ""
    message, trace = wire.words(message[:MESSAGE_CHARACTERS]), wire.words(trace[-TRACE_CHARACTERS:])
    return code, wire.to_json({"message": message, "public": True, "trace": trace})


def load(
    worker: Worker,
    target: Any,
    declarations: Optional[dict[str, Any]] = None,
    options: Optional[dict[str, Any]] = None,
) -> Prepared:
    """Makes the model ready. Where that fails, the server is told, and the exception goes on."""
    try:
        model = prepare(find(target) if isinstance(target, str) else target, declarations, options)
        device = model.like.device
        if device is not None and str(device).startswith("cuda") and model.training is None:
            worker.device = Device(sys.modules["torch"], device, worker.answer)
        return model
    except BaseException as err:
        with contextlib.suppress(LinkError):
            worker.refuse(err)
        raise
