"""The client for asyncio: what connect of the package does, awaitable.

    import tensorferry as tf

    async with tf.aio.connect("127.0.0.1:50051") as client:
        y = await client.compute("relu", x)

It has no thread and shares the link and the program with the other clients of the
process. While a task waits, its event loop reads the link, unless another loop or a
thread does. A Client is for any event loop; a Call is for the one that made it.
Cancelling a task that waits for a call cancels the call.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Mapping
from inspect import unwrap
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, cast

from . import _client, _link, _sequence
from ._client import Region
from ._errors import LinkError
from ._link import Link, Steps, Target

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class _Bell:
    """Wakes a task that waits for a target."""

    __slots__ = ("future", "is_rung", "reader")

    def __init__(self, reader: _Reader):
        self.reader, self.is_rung = reader, False
        self.future: asyncio.Future[None] = reader.loop.create_future()

    def release(self) -> None:
        if not self.is_rung:
            self.is_rung = True
            if threading.get_ident() == self.reader.thread:
                self.ring()
            else:
                self.reader.loop.call_soon_threadsafe(self.ring)

    def ring(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _Reader:
    """Has an event loop read a link while tasks wait there. Only release is for other threads.

    While another reads, the reader is back: it looks at the socket no more, which stays
    readable and would keep the loop busy, and waits to be released.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, link: Link):
        self.loop, self.link, self.thread = loop, link, threading.get_ident()
        for other in list(_readers.values()):
            if other.loop.is_closed():  # with tasks that nobody runs any more
                other.bells.clear()
                other.rest()
        self.bells: dict[_Bell, None] = {}
        self.is_back = self.is_rung = False
        # A descriptor of its own: a thread that closes the link does not close it.
        self.fd = os.dup(link._sock.fileno())
        if link.dead is not None:  # that may have been the number of another file
            os.close(self.fd)
            raise link.failure()
        loop.add_reader(self.fd, self.read)
        self.timer = loop.call_later(_link._LOOK_SECONDS, self.look)
        _readers[loop, link] = self

    def read(self) -> None:
        if not self.link.drain():
            self.loop.remove_reader(self.fd)
            self.is_back = True
            # In the list before the last look: a reader who leaves after it releases us.
            self.link._waiting[self] = False
            if not self.link._reading.locked():
                self.resume()
        elif self.link.dead is not None:
            for bell in self.bells:
                bell.ring()

    def release(self) -> None:
        if not self.is_rung:
            self.is_rung = True
            self.loop.call_soon_threadsafe(self.resume)

    def resume(self) -> None:
        self.is_rung = False
        if self.is_back:
            self.is_back = False
            self.link._waiting.pop(self, None)
            self.loop.add_reader(self.fd, self.read)

    def look(self) -> None:
        self.timer = self.loop.call_later(_link._LOOK_SECONDS, self.look)
        self.link.usable()
        self.resume()

    def rest(self) -> None:
        """Leave the link if no task waits."""
        if self.bells or _readers.pop((self.loop, self.link), None) is None:
            return
        self.timer.cancel()
        if self.is_back:
            self.is_back = False
            self.link._waiting.pop(self, None)
        elif not self.loop.is_closed():
            self.loop.remove_reader(self.fd)
        os.close(self.fd)


_readers: dict[tuple[asyncio.AbstractEventLoop, Link], _Reader] = {}


def _forget() -> None:
    # The descriptors would keep the program of the parent alive. The loops, and what they
    # look at, are the parent's.
    for reader in _readers.values():
        os.close(reader.fd)
    _readers.clear()


os.register_at_fork(after_in_child=_forget)


async def _wait(link: Link, target: Target, seen: int, deadline: Optional[float]) -> None:
    """Do what Link.wait does, in an event loop."""
    if deadline is not None and deadline <= time.monotonic():
        link.drain()
        await asyncio.sleep(0)
        return
    if target.turn != seen or link.dead is not None:
        return
    loop = asyncio.get_running_loop()
    try:
        reader = _readers.get((loop, link)) or _Reader(loop, link)
    except (OSError, LinkError):  # another thread has just closed it
        return
    bell = _Bell(reader)
    reader.bells[bell] = None
    target.parked.append(bell)
    timer = None if deadline is None else loop.call_later(deadline - time.monotonic(), bell.ring)
    try:
        # It is in the lists before the last look: whoever dispatches after it rings.
        if target.turn == seen and link.dead is None:
            await bell.future
    finally:
        target.parked.remove(bell)
        reader.bells.pop(bell, None)
        if timer is not None:
            timer.cancel()
        if not reader.bells:
            if loop.is_closed():
                reader.rest()
            else:
                loop.call_soon(reader.rest)  # the task may be about to wait again


async def _drive(steps: Steps[T]) -> T:
    """Do what drive does, in an event loop."""
    try:
        wait = next(steps)
        while True:
            value = None
            try:
                if isinstance(wait, tuple):
                    await _wait(*wait)
                else:
                    value = await asyncio.get_running_loop().run_in_executor(None, wait)
            except BaseException as err:
                wait = steps.throw(err)
            else:
                wait = steps.send(value)
    except StopIteration as end:
        result: T = end.value
    return result


class _Items:
    """The items of an asynchronous iterable, for a Feed.

    A task waits for each. While it is on its way, __next__ returns the _Items; then they call wake.
    """

    wake: Callable[[], None]

    def __init__(self, items: AsyncIterable[Any]):
        self._items = items.__aiter__()
        self._loop = asyncio.get_running_loop()
        self._task: Optional[asyncio.Task[Any]] = None
        self._stopped = False

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        task = self._task
        if task is None and not self._stopped:
            self._task = task = self._loop.create_task(self._item())
            task.add_done_callback(self._done)
        if task is None or not task.done():
            return self
        self._task = None
        try:
            return task.result()
        except StopAsyncIteration:
            raise StopIteration from None

    async def _item(self) -> Any:
        return await self._items.__anext__()

    def _done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # it is seen by who asks for the item, if anybody still does
        self.wake()

    def stop(self) -> None:
        """Ask for no more. It is for any thread."""
        self._stopped = True
        task = self._task
        if task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(task.cancel)


def _awaits(
    method: Callable[Concatenate[_client.Client, P], T], made: Callable[[T], R]
) -> Callable[Concatenate[Client, P], Coroutine[Any, Any, R]]:
    """Return a method of Client that drives the steps of the other client's, and what is made of their result."""
    steps = unwrap(method)

    @functools.wraps(method)
    async def function(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return made(await _drive(steps(self._client, *args, **kwargs)))

    return function


def _same(x: T) -> T:
    return x


class Call(_client.Call):
    """A call that a server works on. Dropping it, or leaving its with, cancels it."""

    __slots__ = ()

    def __init__(self, call: _client.Call):
        super().__init__(call._run, call._model)
        del call._run  # which is not dropped with it

    async def result(self, timeout: Optional[float] = None) -> dict[str, Any]:  # type: ignore[override]
        """Wait for the end and return the results by port.

        DeadlineExceeded after timeout seconds leaves the call as it is.
        """
        outputs: dict[str, Any] = await _drive(unwrap(_client.Call.result)(self, timeout))
        return outputs

    async def regions(self, timeout: Optional[float] = None) -> AsyncIterator[Region]:  # type: ignore[override]
        """Yield the parts of the results as they arrive, in any order, until the end of the call."""
        deadline = _client._deadline(timeout)
        while (region := await _drive(self._region(deadline))) is not None:
            yield region
        for region in self._rest():
            yield region


class Sequence(_sequence.Sequence):
    """A series of calls that share a state on the server, from async with to its end."""

    def __enter__(self) -> Sequence:
        raise TypeError("use async with")

    async def __aenter__(self) -> Sequence:
        return cast(Sequence, await _drive(self._begin()))

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def step(self, x: Any = None, /, **given: Any) -> Any:
        """Do what tensorferry.Sequence.step does."""
        return await _drive(unwrap(_sequence.Sequence.step)(self, x, **given))

    async def close(self) -> None:  # type: ignore[override]
        """End the sequence. A second time is a no-op."""
        await _drive(unwrap(_sequence.Sequence.close)(self))


class Client:
    """A server, by way of the link of this process. connect makes one."""

    def __init__(self, client: _client.Client):
        self._client = client
        client._ahead = _Items

    async def __aenter__(self) -> Client:
        await _drive(self._client._ready())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self._client).replace("Client", "aio.Client", 1)

    def sequence(self, model: str, max_rows: int, *, params: Optional[Mapping[str, Any]] = None) -> Sequence:
        """Return a sequence, which async with begins."""
        return Sequence(self._client, model, max_rows, params)

    compute = _awaits(cast("Callable[..., Any]", _client.Client.compute), _same)  # it has overloads
    call = _awaits(_client.Client.call, Call)
    push = _awaits(_client.Client.push, _same)
    pull = _awaits(_client.Client.pull, _same)
    push_module = _awaits(_client.Client.push_module, _same)
    load_into = _awaits(_client.Client.load_into, _same)
    list = _awaits(_client.Client.list, _same)
    sources = _awaits(_client.Client.sources, _same)
    delete = _awaits(_client.Client.delete, _same)
    models = _awaits(_client.Client.models, _same)
    info = _awaits(_client.Client.info, _same)
    statistics = _awaits(_client.Client.statistics, _same)
    empty = _awaits(_client.Client.empty, _same)
    close = _awaits(_client.Client.close, _same)


def _opens(connect: Callable[P, _client.Client]) -> Callable[P, Client]:
    @functools.wraps(connect)
    def function(*args: P.args, **kwargs: P.kwargs) -> Client:
        return Client(unwrap(connect)(*args, **kwargs))

    return function


connect = _opens(_client.connect)
