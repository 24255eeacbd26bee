"""Computes blocks of one model for a tensorferry server: the guest of docs/link.md in the role of a worker.

A thread reads, computes and answers. Coroutines run in its event loop, which reads while there are any; of several
threads each computes the block that it has read; for a model on a GPU another answers (_device). Inputs are views of
memory that the server lends until the answer; results are copied into such memory once, or not at all where they lie
there already.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import socket
import sys
import threading
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

    run: dict[str, Any]  # the message
    begin: int  # in nanoseconds
    model: Prepared
    call: Any = None
    only: bool = False  # of its call
    alone: bool = False  # on a device
    unwanted: bool = False
    task: Any = None  # of a coroutine
    places: list[tuple[int, wire.Extent]] = dataclasses.field(default_factory=list)  # of inputs: results may lie there
    made: list[Range] = dataclasses.field(default_factory=list)  # for its results, by address
    named: list[Range] = dataclasses.field(default_factory=list)  # of these, what the answer names
    outputs: list[wire.Placed] = dataclasses.field(default_factory=list)
    code: int = 0
    says: bytes = b""
    keep: list[Any] = dataclasses.field(default_factory=list)  # what copies on a device read and write
    event: Any = None  # their end

    def fail(self, err: Exception) -> None:
        self.outputs = []
        self.code, self.says = failure(err)


class Worker:
    """Serves one model over one link."""

    def __init__(self, sock: socket.socket) -> None:
        sock.set_inheritable(False)
        self.link = Link(sock, "worker", timeout=HELLO_SECONDS)
        self.runs: dict[int, Any] = {}  # Call, or the exception that refuses it
        self.blocks: dict[int, Block] = {}  # that are computed
        self.reading = threading.Lock()
        self.device: Optional[Device] = None  # of a model on a GPU that does not train
        self.pins = False  # memory is registered with CUDA: the model is on a GPU, and CUDA has not refused
        self.models: list[Prepared] = []  # the model, and its companions
        self.training: Any = None
        self.told: Any = None  # what the server knows that training keeps
        self.loop: Any = None  # of coroutines

    def refuse(self, err: BaseException) -> None:
        """Says that the model does not load."""
        last = traceback.format_exception_only(type(err), err)[-1].strip()
        self.link.send(wire.encode(wire.READY, json=wire.to_json({"error": wire.words(last[:MESSAGE_CHARACTERS])})))

    def serve(self, model: Prepared) -> None:
        """Computes until the end of the link."""
        self.models, self.training = [model, *model.companions], model.training
        if self.training is not None:
            self.training.room = int(self.link.host.get("memory", 0)) // 2
        self.pins = str(model.like.device).startswith("cuda")
        ready = model.ready()
        if self.device is not None or self.training is not None:
            ready["blocks"] = BLOCKS
        threads = [threading.Thread(target=self.read, daemon=True) for _ in range(model.threads - 1)]
        device = contextlib.closing(self.device) if self.device else contextlib.nullcontext()
        with contextlib.suppress(LinkError), device:
            self.link.send(wire.encode(wire.READY, json=wire.to_json(ready)))
            for thread in threads:
                thread.start()
            self.read()
            for thread in threads:
                thread.join()

    def read(self) -> None:
        """Computes what it reads until the end of the link, or ends it."""
        link = self.link
        try:
            while link.dead is None:
                with self.reading:
                    deadline = None if self.training is None else self.training.tidy()
                    self.tell()
                    message = link.receive(deadline)
                    block = None if message is None else self.handle(message)
                if link._waiting:  # a thread that waits for memory reads if no other does
                    link._pass_on()
                if block is not None:
                    self.run(block)
                    if block.task is not None:
                        self.run_tasks()
        except LinkError:
            pass
        finally:
            link.end("the worker has ended")

    def handle(self, message: dict[str, Any]) -> Optional[Block]:
        """Does what a message says, and returns the block that is to be computed."""
        kind, id = message["kind"], message["id"]
        if kind == wire.RUN:
            block = self.blocks[id] = Block(message, time.perf_counter_ns(), self.models[message["model"]])
            call, block.only = self.runs.get(message["run"]), bool(message["flags"] & wire.ONLY)
            if call is None:
                call = self.call(block.model, message)
                if not block.only:
                    self.runs[message["run"]] = call
            elif block.model.concurrency > 1 and not getattr(call, "max_rows", 0):  # a sequence has one block at a time
                call = copy.copy(call)
            block.call = call
            return block
        if kind == wire.CANCEL and (wanted := self.blocks.get(id)) is not None:  # another thread may answer it now
            wanted.unwanted = True
            if wanted.task is not None:
                wanted.task.cancel()
        elif kind == wire.END:
            self.ended(self.runs.pop(id, None))
        elif kind == wire.GONE and self.training is not None:
            self.training.gone(id)
        return None

    def ended(self, call: Any) -> None:
        self.end(call)
        if not self.blocks and not any(isinstance(c, Call) and not c.max_rows for c in list(self.runs.values())):
            self.tidy()

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
        kept = sum(length * len(ranges) for length, ranges in list(link._free.items()))
        if kept > int(link.host.get("memory", 0)) // KEPT_SHARE:
            link.trim()

    def run(self, block: Block) -> None:
        model = block.model
        try:
            with model.mode():
                said = self.begin(block)
                if not inspect.isawaitable(said):
                    block.outputs = self.results(block, said)
                elif model.threads > 1:
                    raise TypeError(f"{model.threads} threads compute functions, not coroutines: use `async def`")
                else:
                    self.add_task(block, said)
                    return
        except Exception as err:  # at the end of the link the answer says so
            block.fail(err)
        self.done(block)

    def done(self, block: Block) -> None:
        del self.blocks[block.run["id"]]
        if self.device is not None:
            self.device.follow(block)
        else:
            self.answer(block, time.perf_counter_ns() - block.begin)
        if block.only:
            self.ended(block.call)

    def answer(self, block: Block, nanos: int) -> None:
        """Hands the results over, or says why there are none."""
        if not block.code:
            for answered in block.named:
                answered.disown()
        for held in (block.named, block.made, block.keep):
            held.clear()
        if self.training and not (block.code or block.call.max_rows or (kept := self.training.kept()) == self.told):
            self.told, block.says = kept, wire.to_json(kept)
        self.link.send(wire.pack_answer(block.run["id"], block.code, nanos, block.outputs, block.says))

    def begin(self, block: Block) -> Any:
        """Has the model compute a block, and returns what it says."""
        model, call, message = block.model, block.call, block.run
        if isinstance(call, Exception):
            raise call
        call._block, call.row, call.rows = block, message["row"], message["rows"]
        if self.device is not None:
            if self.cancelled(block):  # while it waited for others
                raise ModelError("the call was cancelled")
            block.alone = self.device.idle() and not self.link.inbox and model.concurrency == 1
        given: dict[str, Any] = {}
        for (name, port), placed in zip(model.inputs.items(), message["inputs"]):
            if not placed["dtype"]:  # it was left out
                continue
            extent = placed["range"]
            buffer: Any = bytearray()
            if extent.length:
                memory = self.link.locate(extent)
                self.pin(memory)
                block.keep.append(memory)
                buffer = memoryview(memory.map)[extent.offset : extent.offset + extent.length]
                block.places.append((memory.base + extent.offset, extent))
            like = model.like if self.device is None else model.like._replace(device=None)
            x = tensors.view(like, placed["dtype"], tuple(placed["shape"]), buffer)
            if isinstance(x, tensors.Tensor) and model.like.kind != "tensor":
                raise ModelError(f"input {name} is {x.dtype}, which this {model.like.kind} does not have")
            if model.like.kind == "numpy" and port.whole and model.rows:
                x.flags.writeable = False  # other blocks read it
            given[name] = x if self.device is None else self.device.bring(block, x)
        args, named = model.arguments(given)
        if model.wants_call:
            named["call"] = call
        return model.compute(*args, **named)

    def results(self, block: Block, said: Any) -> list[wire.Placed]:
        """What an answer says of what the model said."""
        model = block.model
        # All are looked at before memory is taken.
        sources = [self.source(model, name, v) for name, v in named_results(list(model.outputs), said)]
        # Where a model has rows, memory of the input is kept for a chunk of every result:
        # none may be narrower than the input.
        widest = max((e.length for _, e in block.places), default=0)
        if model.rows and any(0 < s.nbytes < widest for s, _ in sources):
            block.places.clear()
        outputs = [self.place(block, s, number) for s, number in sources]
        if block.call.max_rows:
            block.says = self.grown(block.call)
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

    def add_task(self, block: Block, said: Any) -> None:
        """Has the loop run what the model has returned to its end."""
        import asyncio

        def finish(task: Any) -> None:
            try:
                block.outputs = self.results(block, task.result())
            except asyncio.CancelledError:
                block.fail(ModelError("the model was cancelled"))
            except Exception as err:
                block.fail(err)
            with contextlib.suppress(LinkError):  # look notices
                self.done(block)
            if not self.blocks:
                self.loop.stop()

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            self.loop.add_reader(self.link._sock, self.look)
            self.loop.call_soon(self.look)  # nobody could wake it
        block.task = asyncio.ensure_future(said, loop=self.loop)
        block.task.add_done_callback(finish)

    def run_tasks(self) -> None:
        """Runs the loop, which handles messages, too, until no coroutine is left."""
        with self.models[0].mode():  # of the thread, whichever coroutine runs
            while self.blocks:
                self.loop.run_forever()

    def look(self) -> None:
        """Handles what has come. It is also called when another has read."""
        link = self.link
        with contextlib.suppress(LinkError):
            link.drain()
            while link.inbox:
                if (block := self.handle(link.inbox.popleft())) is not None:
                    self.run(block)
        if link.dead is not None:
            self.loop.remove_reader(link._sock)
            for block in self.blocks.values():
                block.task.cancel()

    def wake(self) -> None:
        """Has the loop look at what another has read."""
        if self.loop is not None and self.link.inbox:
            self.loop.call_soon_threadsafe(self.look)

    def call(self, model: Prepared, message: dict[str, Any]) -> Any:
        raw = message["json"]
        try:
            if message["flags"] & wire.LONG:
                raw = self.link._long(raw)
            # What nobody looks at is not read.
            looks = model.wants_call or model.params or not message["flags"] & wire.ONLY
            said = wire.from_json(raw) if looks else {}
            params = said.get("params") or {}
            values = {name: p.parse(name, params.get(name)) for name, p in model.params.items()}
        except ValueError as err:  # a ModelError is one
            return err
        call = Call(str(said.get("call", "")), values, said.get("inputs") or [], self)
        call.session, call.max_rows = int(said.get("session", 0)), int(said.get("max_rows", 0))
        return call

    def source(self, model: Prepared, name: str, value: Any) -> tuple[tensors.Source, int]:
        """A result as bytes, and the number of its data type."""
        declared = model.outputs[name].dtypes
        if isinstance(value, (bool, int, float, complex, list)):
            if model.like.kind == "torch":
                import torch

                value = torch.as_tensor(value)
            elif model.like.kind == "numpy":
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

    def place(self, block: Block, source: tensors.Source, number: int) -> wire.Placed:
        """Says where a result lies: in the input, in a range of call.empty, or in one that it is copied to."""
        n, at, extent = source.nbytes, source.address, wire.NOWHERE
        if n:
            for base, e in block.places:
                if at and base <= at and at + n <= base + e.length:
                    return number, source.shape, wire.Extent(e.memory, e.offset + at - base, n)
            mine = next((r for r in block.made if r.address == at and r not in block.named), None)
            to = mine or self.take(n)
            block.named.append(to)
            if mine is None:
                self.pin(to.memory)
                if self.device is None or not self.device.fetch(block, source.keep, to.address):
                    source.write(to.address)
            extent = to.extent(n)
        return number, source.shape, extent

    def take(self, n: int) -> Range:
        """A range for a result. A loop that waits for memory runs nothing else."""
        taken = self.link.take(n, TAKE_SECONDS)
        self.wake()
        return taken

    def pin(self, memory: Memory) -> None:
        """Registers memory with CUDA if the model is on a GPU: its copies need no other memory then."""
        if self.pins and memory.unpin is None:
            memory.unpin = pinned(sys.modules["torch"].cuda.cudart(), memory.base, memory.size)
            self.pins = memory.unpin is not None

    # What a Call uses.

    def empty(self, block: Block, shape: tuple[int, ...], dtype: str) -> Any:
        number = tensors.number_of(dtype)
        whole = tensors.shape_of(shape)
        n = tensors.size_of(number, whole)
        buffer: Any = bytearray()
        if n:
            made = self.take(n)
            block.made.append(made)
            buffer = made.export(n)
        return tensors.view(tensors.Like(block.model.like.kind), number, whole, buffer)

    def cancelled(self, block: Block) -> bool:
        link = self.link
        if not block.unwanted:
            link.drain()
            block.unwanted = link.dead is not None or any(
                m["kind"] == wire.CANCEL and m["id"] == block.run["id"] for m in tuple(link.inbox)
            )
            self.wake()
        return block.unwanted


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
