"""One end of a link: memory shared with the tensorferry program, and messages.

It knows what docs/link.md says of sockets, memory and ends, for both roles, and
refuses to know what calls and models are: a Target takes what comes under its id.
It has no thread. Whoever waits reads the socket and hands on what is for others, one
reader at a time; so any thread may wait, and so may an event loop. What has to wait is
written as Steps, which block nothing themselves. A Range belongs to this process until
it is handed over, or its last user lets it go.
"""

from __future__ import annotations

import _thread
import array
import atexit
import bisect
import collections
import ctypes
import functools
import gc
import inspect
import itertools
import math
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Callable, Optional, Protocol, TypeVar, Union

from . import _errors, _program, _wire
from ._errors import Error, LinkError
from ._version import PROGRAM_VERSION

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")
T = TypeVar("T")

# Ranges of these sizes, powers of two, are kept for the next user: what inputs and
# their pieces need. 10 classes of 16 ranges are 64 MiB. Of small ones there are as many as
# have a MiB: each of many calls at a time has one.
_LEAST_KEPT, _MOST_KEPT, _KEPT_OF_A_SIZE, _KEPT_BYTES = 4 << 10, 2 << 20, 16, 1 << 20
# Ranges to give back wait for each other up to this many bytes or ranges: a message
# for each would cost a small call a tenth of its time.
_GIVE_BYTES, _GIVE_RANGES = 1 << 20, 32
# How often somebody who waits looks whether the program lives and a reader is at
# work. The end of the socket says so at once, unless C code forked a child with it.
_LOOK_SECONDS = 1.0
_CLEAN_SECONDS = 1.0  # between collections of cycles, while many wait for memory
_MOST_TAKES = 512  # without an answer at a time: the program allows 1 024
_END_SECONDS = 2.0  # how long the program may take to end before it is killed


class Memory:
    """Shared memory of the program, mapped until its last user lets it go."""

    __slots__ = ("base", "id", "map", "size", "unpin")

    def __init__(self, id: int, size: int, fd: int):
        self.unpin: Optional[Callable[[], object]] = None  # once it was asked whether it can be pinned
        # Before 3.13 mmap keeps a copy of the descriptor.
        more: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        self.id, self.size = id, size
        self.map = mmap.mmap(fd, size, **more)
        self.base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.map))

    def __del__(self) -> None:
        if getattr(self, "unpin", None) is not None:
            self.unpin()  # type: ignore[misc]


class Range:
    """Bytes of a memory that this process owns. It is given back when it is collected."""

    __slots__ = ("_drop", "length", "memory", "offset", "place")

    def __init__(self, memory: Memory, place: _wire.Extent, drop: Callable[[_wire.Extent], None]):
        self.memory, self.place = memory, place
        _, self.offset, self.length = place
        self._drop: Optional[Callable[[_wire.Extent], None]] = drop

    def __del__(self) -> None:
        # The collector runs this at any point of any thread: it must take no lock.
        drop = self._drop
        if drop is not None:
            drop(self.place)

    @property
    def address(self) -> int:
        return self.memory.base + self.offset

    def extent(self, length: int) -> _wire.Extent:
        return _wire.Extent(self.memory.id, self.offset, length)

    def disown(self) -> _wire.Extent:
        """Forget the range, which is handed over, and return where it is."""
        self._drop = None
        return self.place

    def export(self, length: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Return a buffer over the range that keeps it as long as anybody uses the buffer.

        Views of views end at the object at the bottom of their chain, so it is that
        one which must hold the range: a finalizer of a view above it would run while
        numpy still reads.
        """
        buffer = (ctypes.c_ubyte * length).from_buffer(self.memory.map, self.offset)
        buffer._range = self  # type: ignore[attr-defined]
        return buffer

    def view(self, length: int) -> memoryview:
        """Return the range's bytes, valid while somebody else keeps the range."""
        return memoryview(self.memory.map)[self.offset : self.offset + length]


class Bell(Protocol):
    """Wakes a waiter: a lock that a thread sleeps on, or what an event loop has for one."""

    def release(self) -> None:
        """Wake the waiter. RuntimeError says that it is awake."""


class Target:
    """What waits for messages under an id. turn grows with each that matters to a waiter."""

    __slots__ = ("error", "parked", "turn")

    def __init__(self) -> None:
        self.turn = 0
        self.parked: list[Bell] = []
        self.error: Optional[Error] = None

    def on_done(self, code: int, timings: tuple[int, ...], raw: bytes) -> None:
        """Take the last message under the id."""

    def on_give(self, given: Range) -> None:
        """Take the range that was asked for."""

    def on_result(self, link: Link, *result: Any) -> None:
        """Take a result's announcement."""

    def on_region(self, link: Link, flags: int, number: int, offset: int, length: int, piece: Optional[Range]) -> None:
        """Take news of a part of a result."""

    def on_end(self, error: Error) -> None:
        """Take the end of the link."""
        self.error = error


# A turn to wait for: of a link, a target of it, the turn that was seen, and a deadline.
Turn = tuple["Link", Target, int, Optional[float]]
# What steps wait for: a turn, or the end of a function that may block.
Wait = Union[Turn, Callable[[], Any]]
# An operation that yields what it waits for, for drive or for an event loop.
Steps = Generator[Wait, Any, T]


def drive(steps: Steps[T]) -> T:
    """Run steps to their end on this thread, and return what they return."""
    try:
        wait = next(steps)
        while True:
            value = None
            try:
                if isinstance(wait, tuple):
                    link, target, seen, deadline = wait
                    link.wait(target, seen, deadline)
                else:
                    value = wait()
            except BaseException as err:
                if isinstance(err.__context__, BlockingIOError):  # Ctrl-C when nothing had come for a while
                    err.__context__ = err.__context__.__context__
                wait = steps.throw(err)
            else:
                wait = steps.send(value)
    except StopIteration as end:
        result: T = end.value
    return result


def driven(steps: Callable[P, Steps[T]]) -> Callable[P, T]:
    """Return a function that drives steps. Its __wrapped__ is the steps."""

    @functools.wraps(steps)
    def function(*args: P.args, **kwargs: P.kwargs) -> T:
        return drive(steps(*args, **kwargs))

    # For help: Steps[T] returns T.
    seen = inspect.signature(steps)
    function.__signature__ = seen.replace(return_annotation=seen.return_annotation[len("Steps[") : -1])  # type: ignore
    return function


class _Answer(Target):
    """Waits for the answer to an ask, or to a take: then it is in a dict until then."""

    __slots__ = ("_takes", "given", "raw")

    def __init__(self, takes: Optional[dict[_Answer, None]] = None) -> None:
        super().__init__()
        self.given: Optional[Range] = None
        self.raw = b""
        self._takes = {} if takes is None else takes
        self._takes[self] = None

    def on_done(self, code: int, timings: tuple[int, ...], raw: bytes) -> None:
        del self._takes[self]
        self.raw = raw
        if code:
            self.error = _errors.from_code(code, _wire.from_json(raw))

    def on_give(self, given: Range) -> None:
        del self._takes[self]
        self.given = given


class Link:
    """A link over a socket, which is handed over. It ends with close, or with the program."""

    def __init__(
        self,
        sock: socket.socket,
        role: str,
        *,
        memory: Optional[int] = None,
        alive: Callable[[], bool] = lambda: True,
        timeout: float = 10.0,
    ):
        self.dead: Optional[LinkError] = None
        self.memories: dict[int, Memory] = {}
        self.pending: dict[int, Target] = {}
        self.lent: dict[tuple[int, int], tuple[Optional[Callable[[Range], None]], Range]] = {}
        self.due: collections.deque[Callable[[], None]] = collections.deque()
        self.inbox: collections.deque[dict[str, Any]] = collections.deque()  # of a worker
        self.host: dict[str, Any] = {}  # its hello
        self.ids = itertools.count(1)
        self._sock = sock
        self._send = sock.send
        self._alive = alive
        # Ranges that nobody uses any more. Or, with memory 0, what is to be sent: a kind and its id.
        self._dropped: collections.deque[_wire.Extent] = collections.deque()
        self._free: dict[int, list[_wire.Extent]] = {}
        self._gives: list[_wire.Extent] = []
        self._give_bytes = 0
        self._giving = threading.Lock()
        self._takes: dict[_Answer, None] = {}  # without an answer
        self._cleaned = 0.0  # when cycles were collected last
        self._starts: list[int] = []  # ascending
        self._at: dict[int, Memory] = {}  # by where it starts
        self._reading = threading.Lock()
        self._waiting: dict[Bell, bool] = {}  # of those that would read; True for a thread's
        self._packet = bytearray(_wire.PACKET_BYTES)
        self._into = [self._packet]
        self._fds: list[int] = []
        self._busy = False
        self._space = socket.CMSG_SPACE(4 * 4)
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(_LOOK_SECONDS), 0))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._greet(role, memory, timeout)

    def _greet(self, role: str, memory: Optional[int], timeout: float) -> None:
        hello: dict[str, Any] = {"link": _wire.LINK, "version": PROGRAM_VERSION, "role": role, "pid": os.getpid()}
        if memory is not None:
            hello["memory"] = memory
        self.send(_wire.encode(_wire.HELLO, json=_wire.to_json(hello)))
        deadline = time.monotonic() + timeout
        with self._reading:
            while not self.host and self.dead is None:
                if not self._receive(deadline):
                    raise LinkError("the tensorferry program did not say hello in time")
        said = self.host.get("version")
        if self.host and (said != PROGRAM_VERSION or self.host.get("link") != _wire.LINK):
            raise LinkError(
                f"the package wants the tensorferry program of version {PROGRAM_VERSION}, link {_wire.LINK}, "
                f"and found version {said}, link {self.host.get('link')}",
                hint="set TENSORFERRY_BIN to the program that fits",
            )
        if self.dead is not None:
            raise LinkError(
                "what was started did not say hello: is it the tensorferry program?",
                hint="TENSORFERRY_BIN names the program, else it is that of the wheel",
            )

    # Messages.

    def send(self, packet: bytes) -> None:
        """Send a packet. LinkError says that the link has ended."""
        try:
            self._send(packet)
        except OSError as err:
            self.end(f"the tensorferry program has ended: {err.strerror}")
            raise self.failure() from None

    def usable(self) -> bool:
        """Report whether the link lives. One whose program has just died ends here."""
        if self.dead is None and not self._alive():
            self.end("the tensorferry program has ended")
        return self.dead is None

    def failure(self) -> LinkError:
        """Return a new exception that says why the link has ended."""
        why = self.dead or LinkError("the link has ended")
        return LinkError(why.message, hint=why.hint)

    def ask(self, verb: str, timeout: Optional[float], /, **fields: Any) -> dict[str, Any]:
        """Ask the host for something rare and wait for the answer."""
        return drive(self.asking(verb, timeout, **fields))

    def asking(self, verb: str, timeout: Optional[float], /, **fields: Any) -> Steps[dict[str, Any]]:
        """Do what ask does, as steps."""
        answer = _Answer()
        id = next(self.ids)
        self.pending[id] = answer
        try:
            self.send((yield from self.ask_packet(id, timeout, {"verb": verb, **fields})))
            # The host has the limit; ours is for a host that does not keep it.
            yield from self._answered(answer, None if timeout is None else timeout + 5)
        finally:
            self.pending.pop(id, None)
        return _wire.from_json(answer.raw)

    def ask_packet(self, id: int, timeout: Optional[float], fields: dict[str, Any], flags: int = 0) -> Steps[bytes]:
        """Return the packet of an ask, which is to be sent. Its json goes through memory if it is long."""
        raw = _wire.to_json(fields)
        if 20 + len(raw) <= _wire.PACKET_BYTES:
            return _wire.encode(_wire.ASK, id, flags, millis=millis(timeout), json=raw)
        place = yield from self.taking(len(raw), timeout)
        place.view(len(raw))[:] = raw
        place.disown()
        where = _wire.RANGE.pack(*place.extent(len(raw)))
        return _wire.encode(_wire.ASK, id, flags | _wire.LONG, millis=millis(timeout), json=where)

    def _answered(self, target: Target, seconds: Optional[float] = None) -> Steps[None]:
        """Wait for a target's first turn, and raise its error."""
        yield self, target, 0, None if seconds is None else time.monotonic() + seconds
        if target.error is not None:
            raise target.error
        if target.turn == 0:
            if self.dead is not None:
                raise self.failure()
            raise _errors.DeadlineExceeded(f"no answer from the tensorferry program for {seconds} s")

    def wait(self, target: Target, seen: int, deadline: Optional[float] = None) -> None:
        """Return when target.turn is not seen any more, at the deadline, or when the link has ended."""
        reading = self._reading
        while target.turn == seen and self.dead is None:
            if reading.acquire(False):
                try:
                    while target.turn == seen and not self.due and self.dead is None and self._receive(deadline):
                        pass
                finally:
                    reading.release()
                    if self._waiting:
                        self._pass_on()
            else:
                self._park(target, seen, deadline)
            if self.due:
                self._do_due()
            if deadline is not None and time.monotonic() >= deadline:
                return

    def drain(self) -> bool:
        """Take what has come, without waiting. It reports False if another reads."""
        if not self._reading.acquire(False):
            return False
        try:
            while not self.due and self.dead is None and self._receive(None, socket.MSG_DONTWAIT):
                pass
        finally:
            self._reading.release()
            if self._waiting:
                self._pass_on()
        self._do_due()
        return True

    def _do_due(self) -> None:
        while self.due:
            try:
                self.due.popleft()()
            except IndexError:
                break

    def _park(self, target: Target, seen: int, deadline: Optional[float]) -> None:
        # In both lists before the last look: a reader who leaves after it wakes us.
        bell = _thread.allocate_lock()
        bell.acquire()
        target.parked.append(bell)
        self._waiting[bell] = True
        try:
            if target.turn == seen and self._reading.locked():
                left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
                bell.acquire(timeout=max(left, 0.0))
        finally:
            target.parked.remove(bell)
            self._waiting.pop(bell, None)
            # A reader may have rung for us to read, and we have what we want.
            if self._waiting and target.turn != seen and not self._reading.locked():
                self._pass_on()

    def _pass_on(self) -> None:
        # A thread reads at once, an event loop when it gets to it: nobody waits for a loop.
        waiting = list(self._waiting.items())
        for bell, is_thread in waiting:
            if is_thread and _ring(bell):
                return
        for bell, is_thread in waiting:
            if not is_thread:
                _ring(bell)

    def receive(self, deadline: Optional[float] = None) -> Optional[dict[str, Any]]:
        """Return the next message for a worker, None at the deadline or the end of the link."""
        while not self.inbox:
            with self._reading:
                if self.dead is not None or not (self.inbox or self._receive(deadline)):
                    return None
        return self.inbox.popleft()

    def _receive(self, deadline: Optional[float], flags: int = 0) -> bool:
        """Read and dispatch one message. It reports whether another may come before the deadline.

        With the flag MSG_DONTWAIT only a message that is there counts.
        """
        packet = self._packet
        if packet[0] == 0:
            if deadline is not None:
                left = deadline - time.monotonic()
                if not self._poll.poll(min(max(left, 0), _LOOK_SECONDS) * 1000):
                    self._look()
                    return left > 0
            try:
                size, said, _, _ = self._sock.recvmsg_into(self._into, self._space, flags)
            except BlockingIOError:
                if not flags:
                    self._look()
                return not flags
            except OSError as err:
                self.end(f"the tensorferry program has ended: {err.strerror}")
                return True
            if said:
                fds = array.array("i")
                for level, kind, data in said:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
            if size == 0:
                self.end("the tensorferry program has ended")
                return True
        else:
            # An exception, such as that of Ctrl-C, came between reading a message and
            # dispatching it. What was begun cannot be done twice.
            size = _wire.HEAD.unpack_from(packet)[3]
            if self._busy or (packet[0] == _wire.MEMORY and not self._fds):
                self.end("the link was interrupted in the middle of a message")
                return True
        try:
            kind, flags, id = _wire.head(packet, size)
            if kind == _wire.REGION and flags & _wire.PIECE:
                self._copy(id, packet, size)  # most of the time goes here, and twice does no harm
            self._busy = True
            self._dispatch(kind, flags, id, packet, size)
            packet[0] = 0
            self._busy = False
        except _wire.WireError as err:
            self.end(f"the tensorferry program broke the link's protocol: {err}")
        return True

    def _dispatch(self, kind: int, flags: int, id: int, packet: bytearray, size: int) -> None:
        if kind == _wire.DONE:
            code, timings, results, raw = _wire.unpack_done(packet, size)
            if flags & _wire.LONG:
                raw = self._long(raw)
            target = self.pending.pop(id, None)
            for result in results:
                self._result(target, *result)
            if target is not None:
                target.on_done(code, timings, raw)
                turn(target)
        elif kind == _wire.RESULT:
            self._result(self.pending.get(id), *_wire.unpack_result(packet, size))
        elif kind == _wire.REGION:
            target = self.pending.get(id)
            number, offset, length, place = _wire.unpack_region(packet, size)
            piece = self._own(place) if flags & _wire.PIECE else None
            if piece is not None and place.length != length:
                raise _wire.WireError("a piece is not as long as its region")
            if target is not None:
                target.on_region(self, flags, number, offset, length, piece)
        elif kind == _wire.GIVE:
            for place in _wire.decode(packet[:size])["ranges"]:
                target = self.pending.pop(id, None) if id else None
                if target is not None:
                    target.on_give(self._own(place))
                    turn(target)
                    continue
                lent = self.lent.pop((place.memory, place.offset), None)
                if lent is None:
                    self.put(self._own(place).disown())
                elif lent[0] is None:
                    self.put(lent[1].disown())
                else:
                    lent[0](lent[1])
        elif kind == _wire.MEMORY:
            if len(self._fds) != 1:
                raise _wire.WireError(f"a memory came with {len(self._fds)} descriptors")
            fd = self._fds.pop()
            try:
                memory = Memory(id, _wire.decode(packet[:size])["bytes"], fd)
            except (OSError, ValueError) as err:
                raise _wire.WireError(f"memory {id} cannot be mapped: {err}") from None
            finally:
                os.close(fd)
            self.memories[id] = memory
            self._at[memory.base] = memory
            bisect.insort(self._starts, memory.base)
        elif kind == _wire.FORGET:
            forgotten = self.memories.pop(id, None)
            if forgotten is not None:
                self._starts.remove(forgotten.base)
                del self._at[forgotten.base]
        elif kind == _wire.HELLO:
            self.host = _wire.from_json(packet[16:size])
        elif kind in (_wire.RUN, _wire.CANCEL, _wire.END, _wire.GONE):
            self.inbox.append(_wire.decode(packet[:size]))
        else:
            raise _wire.WireError(f"a host does not send kind {kind}")

    def _result(
        self,
        target: Optional[Target],
        number: int,
        name: str,
        dtype: int,
        shape: tuple[int, ...],
        how: int,
        place: _wire.Extent,
    ) -> None:
        given = self._own(place) if how == _wire.WHOLE and place.memory else None
        if target is not None:
            target.on_result(self, number, name, dtype, shape, how, given)

    def _copy(self, id: int, packet: bytearray, size: int) -> None:
        target = self.pending.get(id)
        copy = getattr(target, "copy", None)
        if copy is not None:
            number, offset, length, place = _wire.unpack_region(packet, size)
            copy(number, offset, length, self.locate(place).base + place.offset)

    def _long(self, raw: bytes) -> bytes:
        place = self._own(_wire.Extent._make(_wire.RANGE.unpack(raw)))
        return bytes(place.view(place.length))

    def _look(self) -> None:
        if not self._alive():
            self.end("the tensorferry program has ended")

    def end(self, why: str) -> None:
        """End the link: all that waits fails. A second time is a no-op."""
        if self.dead is not None:
            return
        self.dead = LinkError(why, hint="the next use starts another; what was under way is lost")
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a reader on another thread
        except OSError:
            pass
        while self.pending:
            try:
                _, target = self.pending.popitem()
            except KeyError:
                break
            target.on_end(self.failure())
            turn(target)
        self._free.clear()
        self.lent.clear()
        for bell in list(self._waiting):
            _ring(bell)

    def close(self) -> None:
        """End the link and close the socket."""
        self.end("the link was closed")
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._let_go()

    def forget(self) -> None:
        """Leave the link to the parent process, in a child after a fork."""
        self.dead = LinkError("this belongs to the parent process", hint="a child process starts a link of its own")
        self._sock.close()
        self.pending.clear()
        self._let_go()

    def _let_go(self) -> None:
        # Memory stays mapped for as long as somebody has a view of it.
        self._free.clear()
        self.lent.clear()
        self._dropped.clear()
        self.memories.clear()
        self._starts.clear()
        self._at.clear()

    # Memory.

    def locate(self, place: _wire.Extent) -> Memory:
        """Return the memory of a range, which is checked."""
        memory = self.memories.get(place.memory)
        if memory is None or place.offset > memory.size or place.length > memory.size - place.offset:
            raise _wire.WireError(f"[{place.offset},+{place.length}) of memory {place.memory} does not exist")
        return memory

    def _own(self, place: _wire.Extent) -> Range:
        return Range(self.locate(place), place, self._dropped.append)

    def find(self, address: int, length: int) -> Optional[_wire.Extent]:
        """Return where bytes lie that somebody uses, if it is memory of the link.

        Memory that is in use is owned, so the address is enough to know.
        """
        at = bisect.bisect_right(self._starts, address)
        if at == 0:
            return None
        memory = self._at[self._starts[at - 1]]
        offset = address - memory.base
        return _wire.Extent(memory.id, offset, length) if offset + length <= memory.size else None

    def take(self, length: int, timeout: Optional[float] = 0.0) -> Range:
        """Return a range of length bytes or more. It waits for timeout seconds while the quota is full."""
        return drive(self.taking(length, timeout))

    def kept(self, length: int) -> Optional[Range]:
        """Return a range of length bytes or more that was kept, if there is one."""
        if self._dropped:
            self.collect()
        free = self._free.get(_class(length))
        try:
            return self._own(free.pop()) if free else None
        except IndexError:
            return None

    def taking(self, length: int, timeout: Optional[float] = 0.0) -> Steps[Range]:
        """Do what take does, as steps."""
        kept = self.kept(length)
        if kept is not None:
            return kept
        try:
            return (yield from self._take(_class(length), 0.0))
        except (_errors.ResourceExhausted, _errors.DeadlineExceeded):
            pass
        self.trim()
        if not self._takes or time.monotonic() - self._cleaned > _CLEAN_SECONDS:
            gc.collect()  # a cycle may hold results that nobody uses
            self._cleaned = time.monotonic()
            self.trim()
        try:
            return (yield from self._take(_class(length), timeout))
        except _errors.DeadlineExceeded as err:
            raise _errors.ResourceExhausted(
                f"no room for {length} bytes in the link's memory: {err.message}",
                hint="drop results that are not needed, or start with connect(memory=...)",
            ) from None

    def _take(self, length: int, timeout: Optional[float]) -> Steps[Range]:
        while len(self._takes) >= _MOST_TAKES and self.dead is None:
            for other in list(self._takes)[:1]:
                yield self, other, 0, None
        answer = _Answer(self._takes)
        id = next(self.ids)
        self.pending[id] = answer
        self.send(_wire.pack_take(id, length, millis(timeout, never=60_000)))
        yield from self._answered(answer)
        assert answer.given is not None
        return answer.given

    def put(self, free: _wire.Extent) -> None:
        """Keep a range for the next user, or give it back."""
        length = free.length
        if self.dead is not None or free.memory not in self.memories:
            return
        if _LEAST_KEPT <= length <= _MOST_KEPT and length & (length - 1) == 0:
            kept = self._free.setdefault(length, [])
            if len(kept) < _KEPT_OF_A_SIZE or len(kept) * length < _KEPT_BYTES:
                kept.append(free)
                return
        self.give(free)

    def give(self, back: _wire.Extent, now: bool = False) -> None:
        """Hand a range over, with others later or now."""
        with self._giving:
            self._gives.append(back)
            self._give_bytes += back.length
            if now or self._give_bytes >= _GIVE_BYTES or len(self._gives) >= _GIVE_RANGES:
                self._flush()

    def lend(self, piece: Range, back: Optional[Callable[[Range], None]] = None) -> None:
        """Note that a message is about to hand a range over, and who wants it back; None keeps it for any."""
        self.lent[(piece.memory.id, piece.offset)] = (back, piece)

    def collect(self) -> None:
        """Do what finalizers left to do."""
        dropped = self._dropped
        while dropped:
            try:
                place = dropped.popleft()
            except IndexError:
                return
            number, kind, id = place
            if number:
                self.put(place)
            elif self.dead is None:
                if kind == _wire.CANCEL and id in self.pending:
                    self.send(_wire.pack_cancel(id))
                elif kind == _wire.ASK:
                    ask = {"verb": "disconnect", "connection": id}
                    self.send(_wire.encode(_wire.ASK, next(self.ids), json=_wire.to_json(ask)))

    def later(self, kind: int, id: int) -> None:
        """Have a call cancelled, or a connection closed. A finalizer may call it."""
        self._dropped.append(_wire.Extent(0, kind, id))

    def trim(self) -> None:
        """Give back what is kept for the next user."""
        self.collect()
        for kept in list(self._free.values()):
            while kept:
                try:
                    self.give(kept.pop())
                except IndexError:
                    break
        with self._giving:
            self._flush()

    def _flush(self) -> None:
        if self._gives and self.dead is None:
            gives, self._gives, self._give_bytes = self._gives, [], 0
            self.send(_wire.pack_give(gives))


def _ring(bell: Bell) -> bool:
    try:
        bell.release()
    except RuntimeError:  # it was rung already
        return False
    return True


def turn(target: Target) -> None:
    """Wake those who wait for a target."""
    target.turn += 1
    if target.parked:
        for bell in list(target.parked):
            _ring(bell)


def _class(length: int) -> int:
    return length if length > _MOST_KEPT else max(_LEAST_KEPT, 1 << (length - 1).bit_length())


def millis(timeout: Optional[float], never: int = 0) -> int:
    """Return seconds as the milliseconds of a message."""
    if timeout is None:
        return never
    return min(max(math.ceil(timeout * 1000), 0), 0xFFFFFFFF)


# The link of this process.

_starting = threading.Lock()
_current: Optional[Link] = None
_process: Optional[subprocess.Popen[bytes]] = None


def current(memory: Optional[int] = None, timeout: float = 10.0) -> Link:
    """Return the link of this process. It starts the program if none runs."""
    link = running()
    if link is not None:
        return link
    with _starting:
        if _current is None or not _current.usable():
            _stop()
            _start(memory, timeout)
        assert _current is not None
        return _current


def running() -> Optional[Link]:
    """Return the link of this process if its program runs."""
    link = _current
    return link if link is not None and link.usable() else None


def _start(memory: Optional[int], timeout: float) -> None:
    global _current, _process
    program = _program.find()
    if memory is None and os.environ.get("TENSORFERRY_LINK_MEMORY"):
        said = os.environ["TENSORFERRY_LINK_MEMORY"]
        if not said.isdigit() or not int(said):
            raise ValueError(f"TENSORFERRY_LINK_MEMORY is {said!r}; it is a number of bytes")
        memory = int(said)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            # A session of its own: Ctrl-C is for Python, which cancels its calls.
            process = subprocess.Popen(
                [program, "link", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_program.environment(),
            )
        _process = process
        _current = Link(ours, "client", memory=memory, alive=functools.partial(_lives, process.pid), timeout=timeout)
    except BaseException as err:
        ours.close()
        _stop()
        if isinstance(err, OSError) and not isinstance(err, Error):
            raise LinkError(f"the tensorferry program {program!r} does not start: {err}") from err
        raise


def _lives(pid: int) -> bool:
    # Popen.poll does the same, and takes a tenth of the Python time of a small call.
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _stop() -> None:
    global _current, _process
    if _current is not None:
        _current.close()
    if _process is not None:
        try:
            _process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            _process.kill()
            _process.wait()
    _current = _process = None


def _forget() -> None:
    global _current, _process, _starting
    _starting = threading.Lock()
    if _current is not None:
        _current.forget()
    if _process is not None:
        _process.returncode = 0  # it is not this process's child
    _current = _process = None


os.register_at_fork(after_in_child=_forget)
atexit.register(_stop)
