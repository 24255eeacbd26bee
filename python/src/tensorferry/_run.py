"""Calls, pushes and pulls on their way: results that come, inputs that are fed.

A Run takes what the host says under its id, on whichever thread reads the link, and is
stepped by those who wait for it. A Feed cuts inputs into pieces and sends them
through a ring of ranges. Neither knows what a caller passed or wants to see.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Callable, Optional

from . import _errors, _files, _link, _tensor, _wire
from ._errors import Error
from ._link import Link, Range, Steps, Target, Turn
from ._tensor import NAMES, Like, Source

# Called with a port or name, the bytes that have moved, and all of them.
Progress = Callable[[str, int, int], None]
_DEADLINE_EXCEEDED = 4  # one of gRPC's codes
_SMALL_BYTES = 64 << 10  # a smaller range saves nothing
_numbers = itertools.count()  # of temporary files
# A folder does not let a file of it be replaced: it may not be changed, or has the file mounted into it.
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)


class File:
    """A result's way to a path or a binary file.

    A path gets the result when it is whole: until then it keeps what it had. It has the
    format that its ending says.
    """

    __slots__ = ("file", "header", "made", "out", "pid", "start")

    def __init__(self, out: Any):
        self.out, self.made, self.pid = out, "", os.getpid()
        self.file: BinaryIO = out
        if isinstance(out, (str, os.PathLike)):
            path = os.fspath(out)
            if not os.path.exists(path) or os.path.isfile(path):
                path = os.path.realpath(path)  # a link to it stays one
                if os.path.exists(path):
                    open(path, "ab").close()  # may it be written?
                self.file = self._beside(path)
            else:
                self.file = open(path, "wb")  # noqa: SIM115
        self.start = self.file.tell()
        self.header = b""  # that is not written

    def _beside(self, path: str) -> BinaryIO:
        made = f"{path}.{os.getpid()}-{next(_numbers)}.tmp"
        try:
            file = open(made, "xb")  # noqa: SIM115
        except OSError as e:
            if e.errno not in _UNWRITABLE or not os.path.exists(path):
                raise
            fd, made = tempfile.mkstemp()
            file = open(fd, "wb")  # noqa: SIM115
        self.made = made
        return file

    def begin(self, name: str, dtype: int, shape: tuple[int, ...]) -> None:
        if self.file is not self.out:
            self.header = _files.header(self.out, name, dtype, shape)
            self.start += len(self.header)

    def _write_header(self) -> None:
        if self.header:
            self.file.seek(self.start - len(self.header))
            self.file.write(self.header)
            self.header = b""

    def write(self, offset: int, data: memoryview) -> None:
        self._write_header()
        self.file.seek(self.start + offset)
        self.file.write(data)

    def finish(self, failed: bool) -> None:
        if self.file is self.out:
            return
        if not failed:
            self._write_header()
        self.file.close()
        made, self.made = self.made, ""
        if made and failed:
            os.unlink(made)
        elif made:
            path = os.path.realpath(self.out)
            try:
                os.replace(made, path)
            except OSError as e:
                if e.errno not in _UNWRITABLE:
                    raise
                try:
                    shutil.copyfile(made, path)
                except OSError as failed:
                    raise OSError(failed.errno, f"{failed.strerror}; the whole result is in {made}", path) from None
                os.unlink(made)
                warnings.warn(f"{path} was written in place: {e.strerror}", stacklevel=2)

    def __del__(self) -> None:
        # Of a call that nobody waited for; a child after a fork leaves it to its parent.
        if getattr(self, "made", "") and self.pid == os.getpid():
            self.finish(True)


class Result:
    """A result on its way."""

    __slots__ = ("address", "arrived", "dtype", "name", "nbytes", "pieces", "range", "shape", "sink", "tensor")

    def __init__(self, name: str, dtype: int, shape: tuple[int, ...], pieces: bool, sink: Any):
        self.name, self.dtype, self.shape, self.pieces, self.sink = name, dtype, shape, pieces, sink
        self.nbytes = _tensor.size_of(dtype, shape)
        self.range: Optional[Range] = None
        self.tensor: Any = None
        self.address = 0  # where pieces are copied to
        self.arrived = 0


class Run(Target):
    """A call, a push or a pull that the host works on."""

    __slots__ = (
        "ended", "feeds", "files", "id", "keep", "like", "link", "moved", "outputs", "progress", "pushed", "raw",
        "regions", "results", "shown", "sinks", "staged", "timings",
    )  # fmt: skip

    def __init__(self, link: Link, id: int, like: Optional[Like]):
        super().__init__()
        self.link, self.id, self.like = link, id, like
        self.ended = False
        self.raw = b""
        self.timings: tuple[int, ...] = ()
        self.results: dict[int, Result] = {}
        self.sinks: dict[str, Any] = {}
        self.feeds: list[Feed] = []
        self.files: deque[tuple[Result, int, Range]] = deque()
        self.regions: Optional[deque[tuple[Result, int, int]]] = None
        self.progress: Optional[Progress] = None
        self.moved: list[list[Any]] = []  # what the feeds had sent at the end, alike
        self.pushed: list[list[Any]] = []  # name, bytes moved, all bytes
        self.shown: dict[tuple[str, str], int] = {}
        self.keep: Any = None  # the inputs
        self.staged: list[Range] = []  # what small inputs were copied to
        self.outputs: Optional[dict[str, Any]] = None

    # What the dispatcher calls. It may be on any thread.

    def on_result(self, link: Link, *result: Any) -> None:
        number, name, dtype, shape, how, given = result
        if not 0 < dtype < len(NAMES):
            raise _wire.WireError(f"a result has data type {dtype}")
        got = Result(name, dtype, shape, how == _wire.PIECES, self.sinks.get(name))
        if given is not None and given.length < got.nbytes:
            raise _wire.WireError(f"a result of {got.nbytes} bytes is in {given.length}")
        self.results[number] = got
        got.range = given
        try:
            if got.sink is not None:
                self._check(got)
            elif got.pieces or (given is None and not got.nbytes):
                got.tensor, got.address = _tensor.empty(self.like or _tensor.default_like(), dtype, shape)
        except Exception as err:
            self.error = self.error or _refused(err)
            link.send(_wire.pack_cancel(self.id))

    def _check(self, got: Result) -> None:
        if isinstance(got.sink, File):
            got.sink.begin(got.name, got.dtype, got.shape)
            return
        have = _tensor.of(got.sink)
        if have.dtype != got.dtype or have.shape != got.shape:
            raise ValueError(
                f"result {got.name!r} is {NAMES[got.dtype]} {got.shape}, out is {NAMES[have.dtype]} {have.shape}"
            )
        got.tensor, got.address = got.sink, have.address

    def copy(self, number: int, offset: int, length: int, address: int) -> None:
        """Copy a piece to its place, as often as it is called."""
        got = self.results.get(number)
        if got is not None and got.address and offset <= got.nbytes and length <= got.nbytes - offset:
            ctypes.memmove(got.address + offset, address, length)

    def on_region(self, link: Link, flags: int, number: int, offset: int, length: int, piece: Optional[Range]) -> None:
        got = self.results.get(number)
        if self.pushed and number < len(self.pushed):
            self.pushed[number][1] += length
            _link.turn(self)
            return
        if got is None or offset > got.nbytes or length > got.nbytes - offset:
            raise _wire.WireError(f"a region [{offset},+{length}) of result {number}, which has no such bytes")
        if piece is not None and isinstance(got.sink, File):
            self.files.append((got, offset, piece))  # its writes are for the caller's thread
            _link.turn(self)
            return
        if piece is not None:
            link.give(piece.disown(), now=True)  # the host waits for it
        elif got.pieces:
            return  # the pieces say it themselves
        self._arrived(got, offset, length)

    def _arrived(self, got: Result, offset: int, length: int) -> None:
        got.arrived += length
        if self.regions is not None:
            self.regions.append((got, offset, length))
        if self.regions is not None or self.progress is not None:
            _link.turn(self)

    def on_done(self, code: int, timings: tuple[int, ...], raw: bytes) -> None:
        self.raw, self.timings = raw, timings
        if code and self.error is None:
            said = _wire.from_json(raw)
            if code == _DEADLINE_EXCEEDED:
                said["message"] = f"{said.get('message', '')}{self._unsent()}"
            self.error = _errors.from_code(code, said)
        self._end()

    def on_end(self, error: Error) -> None:
        self.error = self.error or error
        self._end()

    def _end(self) -> None:
        self.ended = True
        for staged in self.staged:
            self.link.put(staged.disown())
        self.staged = []
        feeds, self.feeds = self.feeds, []  # they have the run: a cycle would keep the results until it is collected
        for feed in feeds:
            feed.stop()
            self.moved += feed.sent
        self.keep = None

    # What those who wait do.

    def step(self, deadline: Optional[float]) -> Optional[Turn]:
        """Feed the inputs, write to files, and return what to wait for then, None at the end."""
        seen = self.turn
        link = self.link
        if link.dead is not None and not self.ended:
            self.on_end(link.failure())
        moved = False
        for feed in self.feeds:
            moved = feed.pump(True) or moved
        while self.files:
            try:
                got, offset, piece = self.files.popleft()
            except IndexError:
                break
            if self.error is None:
                got.sink.write(offset, piece.view(piece.length))
            link.give(piece.disown(), now=True)  # the host waits for it
            self._arrived(got, offset, piece.length)
        if self.progress is not None:
            self._show()
        if self.ended:
            return None
        if self.feeds and deadline != 0.0 and any(feed._asking == threading.get_ident() for feed in self.feeds):
            raise RuntimeError(
                "the items of a Stream wait for a result of their own call, and the thread that waits makes them: "
                "use tensorferry.aio"
            )
        # While an iterator makes more, see what has come and wait for nothing.
        return link, self, seen, time.monotonic() if moved else deadline

    def finish(self, deadline: Optional[float]) -> Steps[None]:
        """Wait for the end. An exception on the way cancels the run."""
        try:
            while not self.ended or self.files:
                turn = self.step(deadline)
                if turn is not None:
                    yield turn
                if deadline is not None and not self.ended and time.monotonic() >= deadline:
                    raise _errors.DeadlineExceeded(
                        f"there is no result yet{self._unsent()}", hint="result may be called again"
                    )
        except _errors.DeadlineExceeded:
            raise
        except BaseException:
            self.cancel()
            self.error = self.error or _errors.Cancelled("the call was cancelled")  # it may have ended before
            self.close()
            raise
        if self.progress is not None:
            self._show()
        if self.error is None and self.sinks:
            known = [got.name for got in self.results.values()]
            unknown = [name for name in self.sinks if name not in known]
            if unknown:
                self.error = _errors.InvalidArgument(
                    f"out names {', '.join(map(repr, unknown))}; "
                    f"the results are {', '.join(map(repr, known)) or 'none'}"
                )
        self.close()
        if self.error is not None:
            self.results = {}  # its traceback has the run
            raise self.error

    def _unsent(self) -> str:
        held = [(feed.sent[feed._at][0], n) for feed in self.feeds if (n := feed._length)]
        return "".join(f"; {n} bytes of {name!r} were made and not sent" for name, n in held)

    def close(self) -> None:
        """Finish the files of a run that has ended."""
        sinks, self.sinks = self.sinks, {}
        for sink in sinks.values():
            if isinstance(sink, File):
                sink.finish(self.error is not None)

    def cancel(self) -> None:
        if not self.ended and self.link.dead is None:
            self.error = self.error or _errors.Cancelled("the call was cancelled")
            for feed in self.feeds:
                feed.stop()
            self.link.send(_wire.pack_cancel(self.id))

    def tensor_of(self, got: Result) -> Any:
        if got.tensor is None and got.sink is None and got.range is not None:
            got.tensor = _tensor.view(
                self.like or _tensor.default_like(), got.dtype, got.shape, got.range.export(got.nbytes)
            )
            got.range = None
        return got.tensor if got.sink is None or not isinstance(got.sink, File) else got.sink.out

    def collect(self) -> dict[str, Any]:
        """Return the results of a run that has ended well."""
        if self.outputs is None:
            outputs = {got.name: self.tensor_of(got) for got in self.results.values()}
            if self.like is not None and self.like.device is not None:
                device = self.like.device
                outputs = {name: y.to(device) if hasattr(y, "data_ptr") else y for name, y in outputs.items()}
            self.outputs = outputs
        return self.outputs

    def _show(self) -> None:
        assert self.progress is not None
        sent = self.pushed or self.moved or [entry for feed in self.feeds for entry in feed.sent]
        now = {("in", name): (moved, all) for name, moved, all in sent}
        now.update({("out", got.name): (got.arrived, got.nbytes) for got in self.results.values()})
        for key, (moved, all) in now.items():
            if self.shown.get(key) != moved:
                self.shown[key] = moved
                self.progress(key[1], moved, all)


class Feed:
    """Sends tensors in pieces, through a ring of ranges that come back."""

    def __init__(self, run: Run, sources: Sequence[tuple[int, str, Source]], ahead: Optional[Callable[[Any], Any]]):
        self._run, self._link = run, run.link
        self._spare: list[Range] = []
        self._begun: Optional[Range] = None  # and has this many bytes
        self._length = 0
        self._lock = threading.Lock()
        self._left = deque(sources)
        self._over = False
        self.sent: list[list[Any]] = [[name, 0, source.nbytes] for _, name, source in sources]
        self._at = -1
        self._filled = 0
        self._blocks: Iterator[Optional[Source]] = iter(())
        self._block: Optional[Source] = None
        self._offset = 0
        self._by_hand = any(source.items is not None for _, _, source in sources)
        # What is made for a call goes when a chunk of it is whole; the first piece says how large one is.
        self._gradual, self._chunk, self._alone = self._by_hand and not run.pushed, 0, False
        self._looks = False
        self._asking = 0  # the thread that is in the caller's iterator
        self._ahead: list[Any] = []
        for _, name, source in sources:
            if hasattr(source.items, "__aiter__"):
                if ahead is None:
                    raise TypeError(f"the items of {name!r} are asynchronous; tensorferry.aio takes them")
                source.items = items = ahead(source.items)
                items.wake = functools.partial(_link.turn, run)
                self._ahead.append(items)
        # Each piece wakes the program, which takes a core from us: two MiB at a time are
        # quicker than one. A block without an address is copied as one, though: it may
        # begin just below a MiB and have as much.
        self._room = 2 * _wire.PIECE_BYTES
        in_memory = all(s.address or s.nbytes <= _wire.PIECE_BYTES for _, _, s in sources)
        self._piece = self._room if in_memory and not self._by_hand else _wire.PIECE_BYTES
        if self._gradual:  # all ranges together hold the input once, and each a row, as far as they may
            source = sources[0][2]
            parts = min((*source.shape, 1)[0] or 1, _wire.PIECES_AT_A_TIME)
            part = max(-(-source.nbytes // parts), _SMALL_BYTES)
            self._room = self._piece = min(self._piece, part, source.nbytes or 1)
        self._index = -1
        self._source: Optional[Source] = None

    def open(self, timeout: Optional[float]) -> Steps[None]:
        """Take the ranges. It waits for the first of them."""
        pieces = sum(-(-source.nbytes // self._piece) for _, _, source in self._left)
        most = _wire.PIECES_AT_A_TIME if self._gradual else min(pieces, _wire.PIECES_AT_A_TIME)
        for i in range(most):
            try:
                self._spare.append((yield from self._link.taking(self._room, 0.0 if i else timeout)))
            except _errors.ResourceExhausted:
                if not i:
                    raise
                self._alone = i == 1
                break

    def stop(self) -> None:
        """Send no more. What is on its way comes back to others."""
        self._over = True
        for items in self._ahead:
            items.stop()
        while self._spare:
            try:
                self._link.put(self._spare.pop().disown())
            except IndexError:
                break

    def pump(self, own: bool) -> bool:
        """Send what the ranges at hand have room for. It reports whether an iterator has more to send now."""
        if self._over or not (self._begun or self._spare) or (self._by_hand and not own):
            return False
        if not self._lock.acquire(False):
            return False
        try:
            while (self._begun or self._spare) and not self._over:
                if not self._send():
                    return self._looks
                if self._by_hand:
                    break
        finally:
            self._lock.release()
        return self._by_hand and bool(self._spare) and not self._over

    def _back(self, piece: Range) -> None:
        self._spare.append(piece)
        if self._over:
            self.stop()
        elif self._by_hand:
            _link.turn(self._run)
        else:
            self._link.due.append(self._pump)

    def _pump(self) -> None:
        try:
            self.pump(False)
            if self._run.progress is not None:
                _link.turn(self._run)
        except Error:
            pass  # the link has ended, which every call of it says itself

    def _send(self) -> bool:
        """Send a piece, or stop at the end. It reports False if an item is missing that is yet to come."""
        piece = self._begun = self._begun or self._spare.pop()
        if not self._fill(piece):
            return False
        length, self._begun, self._length, self._looks = self._length, None, 0, False
        self._chunk = self._chunk or length
        if length:
            self._link.lend(piece, self._back)
            self._link.send(_wire.pack_data(self._run.id, self._index, piece.memory.id, piece.offset, length))
            self.sent[self._at][1] += length
        else:
            self._link.put(piece.disown())
            self.stop()
        return True

    def _fill(self, piece: Range) -> bool:
        """Copy the next bytes of the current tensor, or of the next one, to the piece; none at the end of the last.

        It reports False if an item is missing, and goes on where it was when it is called again.
        """
        while not self._length and (self._source is None or self._filled == self._source.nbytes):
            if not self._is_at_end():
                return False
            if not self._left:
                return True
            self._index, _, self._source = self._left.popleft()
            self._at += 1
            self._filled, self._blocks, self._block = 0, self._source.blocks(), None
        source = self._source
        assert source is not None
        while self._length < self._piece and self._filled < source.nbytes:
            block = self._block
            if block is None:
                # Without a range for the next item, more go into this piece, after a look whether one has come.
                if self._gradual and self._is_whole(source):
                    if self._spare or self._alone:
                        return True
                    self._looks = not self._looks
                    if self._looks:
                        return False
                try:
                    block = self._made()
                except StopIteration:
                    raise ValueError(f"a Stream of {source.nbytes} bytes ends after {self._filled}") from None
                if block is None:
                    return False
                self._block, self._offset, self._looks = block, 0, False
                if self._gradual and block.nbytes and not block.address:  # it may be cut
                    held = (ctypes.c_ubyte * block.nbytes)()
                    block.write(ctypes.addressof(held))
                    block.address, block.keep = ctypes.addressof(held), held
                if self._gradual and not self._filled and block.nbytes > self._piece:
                    # A large item goes in equal pieces of whole elements, unless only small ones would do.
                    least, width = -(-block.nbytes // self._piece), _tensor.WIDTHS[source.dtype]
                    fit = (block.nbytes // n for n in range(least, 64 * least) if not block.nbytes % (n * width))
                    self._piece = next(fit, self._piece)
            n = block.nbytes - self._offset
            if n > source.nbytes - self._filled:
                raise ValueError(f"a Stream of {source.nbytes} bytes has more")
            if block.address:
                n = min(n, self._piece - self._length)
                ctypes.memmove(piece.address + self._length, block.address + self._offset, n)
            elif n:
                block.write(piece.address + self._length)
            self._length += n
            self._filled += n
            self._offset += n
            if self._offset == block.nbytes:
                self._block = None
        # Before the last piece goes: with it the call could end well. But in an event loop, whose turn says whether
        # there is more, the items of a call may wait for its result.
        if self._filled < source.nbytes or self._is_at_end():
            return True
        self._looks = self._gradual and not self._looks
        return self._gradual and not self._looks

    def _is_at_end(self) -> bool:
        """Report whether the current tensor has no more bytes, and raise if it is a Stream that yields more."""
        source = self._source
        if source is not None and source.items is not None:
            with contextlib.suppress(StopIteration):
                while True:
                    block = self._made()
                    if block is None:
                        return False
                    if block.nbytes:
                        raise ValueError(f"a Stream of {source.nbytes} bytes has more")
        return True

    def _made(self) -> Optional[Source]:
        """Have the caller's iterator make the next block."""
        self._asking = threading.get_ident()
        try:
            return next(self._blocks)
        finally:
            self._asking = 0

    def _is_whole(self, source: Source) -> bool:
        """Report whether the piece has the last bytes of a chunk. The first piece is one."""
        if not self._chunk:
            return self._length > source.nbytes // _wire.CHUNKS
        return self._filled // self._chunk > (self._filled - self._length) // self._chunk


def _refused(err: Exception) -> Error:
    return _errors.InvalidArgument(str(err), hint="give another out")
