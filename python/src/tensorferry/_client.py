"""The client: calls of models, and the tensors of a server's store.

A Client asks a server through the link of this process. It computes nothing, and
speaks to no network itself. Its methods are steps that are driven; aio drives the same
steps in an event loop. It is for any thread; a Call too, except that one thread
at a time iterates over its regions. Inputs are read until the call has ended, so who
writes to one before changes what is sent. Results that came whole are views of
memory of the link: it is given back when the last view of it is collected.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import unwrap
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, SupportsIndex, TypeVar, Union, overload

from . import _errors, _link, _tensor, _wire
from ._errors import Error
from ._link import Link, Range, Steps, Target, drive, driven
from ._model import ANY_AXES, FREE, KINDS, Param, Port
from ._run import Feed, File, Progress, Result, Run
from ._sequence import Sequence as Calls
from ._tensor import NAMES, Like, Source, Tensor

_ASK_SECONDS = 30.0  # metadata requests, when the caller names no limit
_SMALL_BYTES = 32 << 20  # of small tensors of a push that are in memory of the link at once
_MEMORY_SECONDS = 30.0  # how long a call waits for room in the link's memory
_NOWHERE = _wire.RANGE.pack(*_wire.NOWHERE)
_has_warned = False  # of an input's gradient

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")
T = TypeVar("T")
# Where a result goes: a path, a binary file, or an array, tensor or buffer.
Out = Any
Path = Union[str, "os.PathLike[str]"]


class Timings(NamedTuple):
    """Where the time of a call went on the server, in seconds."""

    receive: float
    queue: float
    host_to_device: float
    compute: float
    device_to_host: float
    first_result: float
    total: float


class Region(NamedTuple):
    """A part of a result that has arrived.

    rows are the rows along the leading axis that lie in it as a whole, for
    region.tensor[region.rows]; None for a result without axes. tensor is the whole
    result, of which other parts may not have arrived; it and data are None where
    the result goes to a file.
    """

    port: str
    offset: int
    length: int
    rows: Optional[slice]
    data: Optional[memoryview]
    tensor: Any


class Served(NamedTuple):
    """A model that a server can run. See tensorferry.model for what its fields mean."""

    name: str
    version: str
    device: str
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    rows: Union[int, str]
    params: Mapping[str, Param]
    idempotent: bool
    about: Mapping[str, str]


class Percentiles(NamedTuple):
    """Durations in seconds."""

    p50: float
    p90: float
    p99: float
    max: float


class Statistics(NamedTuple):
    """What a client has done: calls, pushes and pulls, the attempts at them, failures by code, bytes, and time."""

    calls: int
    attempts: int
    retries: int
    failures: Mapping[str, int]
    sent: int
    received: int
    network: Percentiles
    server: Percentiles
    total: Percentiles


class Stored(NamedTuple):
    """A tensor in the store of a server."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    digest: str
    durable: bool
    stored: Optional[str]  # when, in RFC 3339
    file: str  # the file in the server's folder that it is a part of
    metadata: Mapping[str, str]  # what was pushed with it


class Pushed(NamedTuple):
    """A tensor that the server has stored."""

    name: str
    bytes: int
    digest: str
    durable: bool
    evicted: int  # how many other tensors the server's store evicted to make room


class Call:
    """A call that a server works on. Dropping it, or leaving its with, cancels it."""

    __slots__ = ("_model", "_run")

    def __init__(self, run: Run, model: str):
        self._run, self._model = run, model

    def __repr__(self) -> str:
        error = self._run.error
        state = "running" if not self._run.ended else "done" if error is None else f"failed: {error!r}"
        return f"<{type(self).__module__}.Call of {self._model}, {state}>"

    @driven
    def result(self, timeout: Optional[float] = None) -> Steps[dict[str, Any]]:
        """Wait for the end and return the results by port.

        DeadlineExceeded after timeout seconds leaves the call as it is.
        """
        yield from self._run.finish(_deadline(timeout))
        return self._run.collect()

    def regions(self, timeout: Optional[float] = None) -> Iterator[Region]:
        """Yield the parts of the results as they arrive, in any order, until the end of the call."""
        deadline = _deadline(timeout)
        while (region := drive(self._region(deadline))) is not None:
            yield region
        yield from self._rest()

    def _region(self, deadline: Optional[float]) -> Steps[Optional[Region]]:
        """Wait for a part of a result, and return it; None at the end of the call."""
        run = self._run
        while not run.regions:
            if run.ended and not run.files:
                yield from run.finish(None)
                return None
            try:
                turn = run.step(deadline)
                if turn is not None:
                    yield turn
            except BaseException:
                run.cancel()
                raise
            if deadline is not None and not run.ended and time.monotonic() >= deadline:
                raise _errors.DeadlineExceeded(f"no region came in time{run._unsent()}")
        return _region(run, *run.regions.popleft())

    def _rest(self) -> Iterator[Region]:
        """Yield the results of which no parts were announced."""
        for got in self._run.results.values():
            if got.arrived < got.nbytes:
                yield _region(self._run, got, 0, got.nbytes)

    def cancel(self) -> None:
        """Have the server stop. A call that has ended stays as it is."""
        self._run.cancel()

    def done(self) -> bool:
        """Report whether the call has ended, without waiting."""
        if not self._run.ended:
            turn = self._run.step(0.0)
            if turn is not None:
                self._run.link.wait(*turn[1:])
        return self._run.ended

    @property
    def id(self) -> str:
        """The id that the server knows the call by, empty before the end."""
        if self._run.error is not None:
            return self._run.error.call
        return str(_wire.from_json(self._run.raw).get("call", "")) if self._run.ended else ""

    @property
    def timings(self) -> Optional[Timings]:
        """Where the time went, None before the end."""
        return Timings(*[n / 1e9 for n in self._run.timings]) if self._run.timings else None

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._run.ended:
            try:
                self._run.cancel()
            except Error:
                pass

    def __del__(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None and not run.ended:
            run.link.later(_wire.CANCEL, run.id)


class Client:
    """A server, by way of the link of this process. connect makes one."""

    def __init__(self, how: Mapping[str, Any], timeout: float = 10.0, memory: Optional[int] = None):
        self._how, self._timeout, self._memory = how, timeout, memory  # how to connect
        self._closed = False
        self._ahead: Optional[Callable[[Any], Any]] = None  # reads asynchronous items
        self._link: Optional[Link] = None
        self._connection = 0  # of the link, which is set after it
        self._opening: dict[Link, Target] = {}  # of links to which somebody connects
        self._parts: dict[Any, bytes] = {}  # of messages, packed
        self._ports: dict[str, str] = {}  # the only result, by model
        self._ends: set[Callable[[], None]] = set()  # what comes before the end, such as a step that was not sent

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        link = getattr(self, "_link", None)
        if link is not None and not self._closed:
            link.later(_wire.ASK, self._connection)

    def __repr__(self) -> str:
        return f"<tensorferry.Client of {self._how['target']}{', closed' if self._closed else ''}>"

    @driven
    def close(self) -> Steps[None]:
        """Close the connection. Its calls fail; their results stay. A second time is a no-op."""
        if self._closed:
            return
        try:
            ends = contextlib.ExitStack()  # has all of them run, whichever fail
            for end in list(self._ends):
                ends.callback(end)
            yield ends.close
        finally:
            self._closed = True
            link = self._link
            if link is not None and link.dead is None:
                try:
                    link.collect()
                    yield from link.asking("disconnect", _ASK_SECONDS, connection=self._connection)
                except Error:
                    pass  # it is closed all the same

    def _known(self) -> Optional[Link]:
        """Return the link with a connection, if there is one."""
        if self._closed:
            raise ValueError("the client is closed")
        return self._link if self._link is not None and self._link.usable() else None

    def _ready(self) -> Steps[Link]:
        """Return the link, with a connection of it to the server."""
        while True:
            known = self._known()
            if known is not None:
                return known
            link: Link = _link.running() or (yield functools.partial(_link.current, self._memory, self._timeout))
            mine = Target()
            opening = self._opening.setdefault(link, mine)
            if opening is not mine:
                yield link, opening, 0, None
                continue
            try:
                if self._link is not link:
                    said = yield from link.asking("connect", self._timeout, **self._how)
                    self._connection = int(said["connection"])
                    self._link = link
            finally:
                del self._opening[link]
                _link.turn(mine)

    # Calls.

    @overload
    def compute(
        self,
        model: str,
        x: Union[bytes, bytearray, memoryview],
        *,
        params: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
        out: Any = None,
        copy: bool = False,
    ) -> Tensor: ...
    @overload
    def compute(
        self,
        model: str,
        x: T,
        *,
        params: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
        out: Optional[T] = None,
        copy: bool = False,
    ) -> T: ...
    @driven
    def compute(
        self,
        model: str,
        x: Any,
        *,
        params: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
        out: Any = None,
        copy: bool = False,
    ) -> Steps[Any]:
        """Run a model of one input and one result, and return the result.

        It is of the same library as x, and on its device; for a buffer it is a Tensor.
        out is an array that the result is written to. A copy leaves no memory of the
        link in use.
        """
        if out is not None and isinstance(out, Mapping):
            raise TypeError("out of compute is one array; call takes a mapping of names to arrays")
        sinks = None if out is None else {(yield from self._result_of(model)): out}
        run = yield from self._start(model, {"": x}, params, timeout, sinks, None, None)
        yield from run.finish(None)
        outputs = run.collect()
        if len(outputs) != 1:
            raise ValueError(f"model {model!r} has the results {', '.join(outputs)}; use call")
        (y,) = outputs.values()
        return _copied(y) if copy and out is None else y

    @driven
    def call(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        params: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
        out: Optional[Mapping[str, Out]] = None,
        metadata: Optional[Mapping[str, Mapping[str, str]]] = None,
        like: Optional[str] = None,
        regions: bool = True,
        progress: Optional[Progress] = None,
        idempotent: bool = False,
    ) -> Steps[Call]:
        """Start a model over inputs by port, and return the call.

        An input is a tensor, or a Stream. timeout is for the server, in seconds. out
        has by port where a result goes: an array, a path or a binary file. metadata
        is by port. like is what results are: "numpy", "torch" or "tensor"; as the
        inputs are if it is None. Without regions the call costs less and Call.regions
        yields only whole results. An idempotent call may be repeated though it may have
        begun, if the client has retries.
        """
        _named("inputs", inputs)
        chosen = None if like is None else _tensor.default_like(like)
        run = yield from self._start(
            model, inputs, params, timeout, out, metadata, chosen, regions, progress, idempotent
        )
        return Call(run, model)

    def _start(
        self,
        model: str,
        inputs: Mapping[str, Any],
        params: Optional[Mapping[str, Any]],
        timeout: Optional[float],
        out: Optional[Mapping[str, Out]],
        metadata: Optional[Mapping[str, Mapping[str, str]]],
        like: Optional[Like],
        regions: bool = False,
        progress: Optional[Progress] = None,
        idempotent: bool = False,
        of: Optional[tuple[Link, int]] = None,
    ) -> Steps[Run]:
        metadata = _metadata(metadata)
        if timeout is not None:
            _seconds(timeout)
        link = of[0] if of else self._known() or (yield from self._ready())
        if link._dropped:
            link.collect()
        run = Run(link, next(link.ids), like)
        run.progress = progress
        if regions:
            run.regions = deque()
        limit = _MEMORY_SECONDS if timeout is None else timeout
        parts = [self._packed(model), _params(params) if params else b"\0\0", len(inputs).to_bytes(2, "little")]
        run.keep = sources = []
        for port, x in inputs.items():
            source = _tensor.of(x, port)
            sources.append(source)
            if source.like is not None and source.like.kind == "torch":
                _warn_of_gradient(x)
            if source.like is not None and like is None and (run.like is None or run.like.kind == "tensor"):
                run.like = source.like
            try:
                key = (port, source.dtype, source.shape)
                parts.append(self._parts[key])
            except KeyError:
                parts.append(self._remember(key, _wire.text(port) + _wire.tensor(source.dtype, source.shape) + b"\0\0"))
            parts.append(_wire.texts(metadata[port].items()) if metadata and metadata.get(port) else b"\0\0")
            place = link.find(source.address, source.nbytes) if source.address else None
            if place is None and source.items is None and 0 < source.nbytes <= _wire.PIECE_BYTES:
                staged = link.kept(source.nbytes) or (yield from link.taking(source.nbytes, limit))
                place = _stage(run, source, staged)
            if place is not None and source.nbytes:
                parts += b"\1", _wire.RANGE.pack(*place)
            else:
                parts += b"\0", _NOWHERE
                if source.nbytes or source.items is not None:
                    run.feeds.append(Feed(run, [(len(sources) - 1, port, source)], self._ahead))
        parts.append(_sinks(run, out) if out else b"\0\0")
        packet = _wire.pack_call(
            run.id,
            (_wire.REGIONS if regions else 0) | (_wire.IDEMPOTENT if idempotent else 0),
            of[1] if of else self._connection,
            0 if timeout is None else _millis(timeout),
            b"".join(parts),
        )
        for feed in run.feeds:
            yield from feed.open(limit)
        _send(run, packet)
        return run

    @driven
    def sequence(self, model: str, max_rows: int, *, params: Optional[Mapping[str, Any]] = None) -> Steps[Calls]:
        """Begin a sequence of calls of a model that share a state on the server.

        All steps together bring at most max_rows rows, for which the server may reserve memory. It ends
        a sequence that has no step for as long as a session may be idle, ten minutes by default.
        """
        return (yield from Calls(self, model, max_rows, params)._begin())

    def _result_of(self, model: str) -> Steps[str]:
        for m in (yield from unwrap(Client.models)(self)) if model not in self._ports else ():
            self._ports[m.name] = next(iter(m.outputs)) if len(m.outputs) == 1 else ""
        return self._ports.get(model, "")  # the server says what is wrong with another

    def _packed(self, model: str) -> bytes:
        part = self._parts.get(model)
        if part is not None:
            return part
        if not isinstance(model, str):
            raise TypeError(f"a model is named by a str, not by {model!r}")
        return self._remember(model, _wire.text(model))

    def _remember(self, key: Any, part: bytes) -> bytes:
        if len(self._parts) >= 1024:  # a caller of many shapes
            self._parts.clear()
        self._parts[key] = part
        return part

    # The store.

    @driven
    def push(
        self,
        tensors: Mapping[str, Any],
        *,
        metadata: Optional[Mapping[str, Mapping[str, str]]] = None,
        all: bool = False,
        progress: Optional[Progress] = None,
        timeout: Optional[float] = None,
    ) -> Steps[list[Pushed]]:
        """Store tensors, or Streams, by name, in place of older ones. metadata is by name.

        When some fail, the others are stored and the first failure is raised. With all, they are
        stored together, or none of them is: nobody ever sees some.
        """
        if hasattr(tensors, "state_dict"):
            raise TypeError("push takes a mapping of names to tensors; push_module takes a module")
        _named("tensors", tensors)
        metadata = _metadata(metadata)
        if timeout is not None:
            _seconds(timeout)
        link = self._known() or (yield from self._ready())
        if link._dropped:
            link.collect()
        run = Run(link, next(link.ids), None)
        run.progress = progress
        run.keep = sources = [_tensor.of(x, name) for name, x in tensors.items()]
        asked, fed, small = [], [], 0
        for i, (name, source) in enumerate(zip(tensors, sources)):
            entry: dict[str, Any] = {"name": name, "dtype": NAMES[source.dtype], "shape": source.shape}
            if metadata.get(name):
                entry["metadata"] = dict(metadata[name])
            place = link.find(source.address, source.nbytes) if source.address and source.nbytes else None
            if (
                place is None
                and 0 < source.nbytes <= _wire.PIECE_BYTES
                and source.items is None
                and small < _SMALL_BYTES
            ):
                small += source.nbytes
                place = _stage(run, source, (yield from link.taking(source.nbytes, timeout)))
            if place is not None:
                entry["range"] = place
            else:
                fed.append((i, name, source))
            asked.append(entry)
            run.pushed.append([name, 0, source.nbytes])
        if fed:
            run.feeds.append(Feed(run, fed, self._ahead))
        ask = {"verb": "push", "connection": self._connection, "tensors": asked, "all": all}
        for feed in run.feeds:
            yield from feed.open(timeout)
        _send(run, (yield from link.ask_packet(run.id, timeout, ask, _wire.REGIONS if progress else 0)))
        yield from run.finish(None)
        return [
            Pushed(t["name"], t.get("bytes", 0), t.get("digest", ""), t.get("durable", False), t.get("evicted", 0))
            for t in _checked(_wire.from_json(run.raw))
        ]

    @driven
    def pull(
        self,
        *names: str,
        out: Optional[Mapping[str, Out]] = None,
        source: bool = False,
        params: Optional[Mapping[str, Any]] = None,
        like: Optional[str] = None,
        progress: Optional[Progress] = None,
        timeout: Optional[float] = None,
    ) -> Steps[dict[str, Any]]:
        """Return tensors by name: those that names and globs select, or what sources make of params.

        out has by name where a tensor goes: an array, a path or a binary file.
        """
        _strings("a name", names)
        for what, given in (("params", params), ("out", out)):
            if given is not None:
                _named(what, given)
        if timeout is not None:
            _seconds(timeout)
        link = self._known() or (yield from self._ready())
        if link._dropped:
            link.collect()
        run = Run(link, next(link.ids), _tensor.default_like(like))
        run.progress = progress
        given = {k: str(v) for k, v in (params or {}).items()}
        select = [{"name": n, **({"source": True, "params": given} if source else {})} for n in names]
        if given and not source:
            raise ValueError("params are for sources: source=True")
        to = {name: "pieces" if place is None else place for name, place in _places(run, out or {})}
        ask = {"verb": "pull", "connection": self._connection, "select": select, **({"to": to} if to else {})}
        _send(run, (yield from link.ask_packet(run.id, timeout, ask, _wire.REGIONS if progress else 0)))
        yield from run.finish(None)
        _checked(_wire.from_json(run.raw))
        return run.collect()

    @driven
    def push_module(self, module: Any, prefix: str = "", *, timeout: Optional[float] = None) -> Steps[list[Pushed]]:
        """Store what the state_dict of a torch module has, together, by names below a prefix, such as net/."""
        pushed: list[Pushed] = yield from unwrap(Client.push)(self, _state(module, prefix), all=True, timeout=timeout)
        return pushed

    @driven
    def load_into(self, module: Any, prefix: str = "", *, timeout: Optional[float] = None) -> Steps[None]:
        """Copy what push_module has stored to a torch module of the same structure.

        ValueError says which tensors are missing, or of another data type or shape; it
        leaves the module as it was.
        """
        state = _state(module, prefix)
        found = {t.name: t for t in (yield from unwrap(Client.list)(self, _literal(_under(prefix)) + "**"))}
        wrong = []
        for name, x in state.items():
            t, dtype, shape = found.get(name), NAMES[_tensor.number_of(x.dtype)], tuple(x.shape)
            if t is None:
                wrong.append(f"{name!r} is missing")
            elif (t.dtype, t.shape) != (dtype, shape):
                wrong.append(f"{name!r} is {t.dtype} {t.shape}, the module has {dtype} {shape}")
        if wrong:
            more = [f"and {len(wrong) - 5} more"] if len(wrong) > 5 else []
            raise ValueError("the store does not fit the module: " + "; ".join(wrong[:5] + more))
        # Names of one memory get it once; what is not dense, or on a device, gets a copy.
        once = {(x.data_ptr(), x.device, tuple(x.shape), x.stride()): name for name, x in state.items()}
        direct = {name: state[name] for name in once.values() if _tensor.of(state[name], name).address}
        pulled = yield from unwrap(Client.pull)(
            self, *map(_literal, once.values()), out=direct, like="torch", timeout=timeout
        )
        for name, x in pulled.items():
            if name not in direct:
                state[name].copy_(x)

    @driven
    def list(self, glob: str = "", *, timeout: Optional[float] = _ASK_SECONDS) -> Steps[list[Stored]]:
        """Return the tensors of the store whose names match a glob, all if it is empty."""
        _strings("glob", [glob])
        return [
            Stored(
                t["name"], t["dtype"], tuple(t["shape"]), t["bytes"], t.get("digest", ""), t.get("durable", False),
                t.get("stored"), t.get("file", ""), t.get("metadata") or {},
            )
            for t in (yield from self._ask("list", timeout, glob=glob)).get("tensors") or ()
        ]  # fmt: skip

    @driven
    def sources(self, *, timeout: Optional[float] = _ASK_SECONDS) -> Steps[Sequence[str]]:
        """Return the names that pull(source=True) may use."""
        return (yield from self._ask("list", timeout, glob="")).get("sources") or ()

    @driven
    def delete(self, *names: str, timeout: Optional[float] = _ASK_SECONDS) -> Steps[Sequence[str]]:
        """Remove tensors, by name or glob, and return the names of those that were removed."""
        _strings("a name", names)
        return (yield from self._ask("delete", timeout, names=names)).get("names") or ()

    @driven
    def models(self, *, timeout: Optional[float] = _ASK_SECONDS) -> Steps[Sequence[Served]]:
        """Return the models that the server can run."""
        return [
            Served(
                m["name"], m.get("version", ""), m.get("device", ""), _ports(m["inputs"]), _ports(m["outputs"]),
                int(m["rows"]) if m["rows"].isdigit() else m["rows"], _params_of(m.get("params") or ()),
                m.get("idempotent", False), m.get("about") or {},
            )
            for m in (yield from self._ask("models", timeout)).get("models") or ()
        ]  # fmt: skip

    @driven
    def info(self, *, timeout: Optional[float] = _ASK_SECONDS) -> Steps[dict[str, Any]]:
        """Return what the server is, as tensorferry info --json prints it."""
        return (yield from self._ask("info", timeout))

    @driven
    def statistics(self) -> Steps[Statistics]:
        """Return what the client has done so far."""
        said = yield from self._ask("statistics", _ASK_SECONDS)
        for name in ("network", "server", "total"):
            said[name] = Percentiles(**{p: nanos / 1e9 for p, nanos in said[name].items()})
        said["failures"] = {_errors.from_code(int(code), {}).code: n for code, n in said["failures"].items()}
        return Statistics(**said)

    def _ask(self, verb: str, timeout: Optional[float], **fields: Any) -> Steps[dict[str, Any]]:
        link = yield from self._ready()
        return (yield from link.asking(verb, timeout, connection=self._connection, **fields))

    # Memory.

    @driven
    def empty(
        self, shape: Union[int, Sequence[SupportsIndex]], dtype: Any = "float32", *, like: Optional[str] = None
    ) -> Steps[Any]:
        """Return a tensor in memory of the link, of any content. It is sent without a copy."""
        number = _tensor.number_of(dtype)
        dims = _tensor.shape_of([shape] if isinstance(shape, int) else shape)
        size = _tensor.size_of(number, dims)
        chosen = _tensor.default_like(like)
        if not size:
            return _tensor.empty(chosen, number, dims)[0]
        made = yield from (yield from self._ready()).taking(size, _MEMORY_SECONDS)
        return _tensor.view(chosen, number, dims, made.export(size))


def _opens(client: Callable[P, Client]) -> Callable[P, Client]:
    @functools.wraps(client)
    def function(*args: P.args, **kwargs: P.kwargs) -> Client:
        made = client(*args, **kwargs)
        drive(made._ready())
        return made

    return function


@_opens
def connect(
    target: Optional[str] = None,
    *,
    timeout: float = 10.0,
    memory: Optional[int] = None,
    lanes: int = 64,
    wait: float = 0.0,
    retry: Union[str, Sequence[float]] = "none",
    retry_for: float = 60.0,
    break_after: int = 0,
    tls: Optional[bool] = None,
    ca: Optional[Path] = None,
    cert: Optional[Path] = None,
    key: Optional[Path] = None,
    token: Optional[Path] = None,
    server_name: Optional[str] = None,
) -> Client:
    """Connect to a server: host:port or unix:/path, else $TENSORFERRY_SERVER, else 127.0.0.1:50051.

    The server is not asked before the first use. timeout is for starting the program, in
    seconds. memory is the most bytes that this process shares with it; it counts when
    the program starts, which is with the first client. lanes is the most connections
    beside the one of gRPC that a session has for large tensors, 0 to 64; 0 is none.
    wait is how long a use waits for a server that cannot be reached, in seconds.

    retry says when what failed and may be repeated is repeated: "none", "exponential",
    "adaptive", "fixed", or the seconds to wait before each attempt. No attempt begins later
    than retry_for seconds after the first. After break_after attempts in a row that found
    no server none is made for ten seconds; 0 is never. docs/retries.md says more.

    ca is the file of the authority of the server's certificate, tls=True takes those that
    the system trusts. cert and key are the files of the client's certificate and its key,
    token that of its token. server_name is the name in the server's certificate, if that is
    not the host of target. Any of them secures the connection. Else $TENSORFERRY_CA, _CERT,
    _KEY, _TOKEN, _SERVER_NAME and _TLS say it.
    """
    if target is not None and not isinstance(target, str):
        raise TypeError(f"target is {target!r}; write host:port or unix:/path")
    if memory is not None and (not isinstance(memory, int) or memory <= 0):
        raise ValueError(f"memory is {memory!r}; it is a number of bytes, 1 or more")
    if isinstance(lanes, bool) or not isinstance(lanes, int) or not 0 <= lanes <= 64:
        raise ValueError(f"lanes is {lanes!r}; it is 0 to 64")
    for name, given in (("wait", wait), ("retry_for", retry_for)):
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= 86400:
            raise ValueError(f"{name} is {given!r}; it is in seconds, 0 to 86400")
    waits = retry
    if not isinstance(retry, str):
        try:
            waits = ",".join(f"{float(s)}s" for s in retry)
        except TypeError:
            raise ValueError(f"retry is {retry!r}; it is a policy, such as 'exponential', or seconds") from None
    if isinstance(break_after, bool) or not isinstance(break_after, int) or break_after < 0:
        raise ValueError(f"break_after is {break_after!r}; it is a number of attempts, or 0 for never")
    target = target or os.environ.get("TENSORFERRY_SERVER") or "127.0.0.1:50051"
    if tls is None:
        tls = os.environ.get("TENSORFERRY_TLS", "") not in ("", "0", "false")
    how: dict[str, Any] = {
        "target": target,
        "lanes": lanes,
        "wait_millis": int(wait * 1000),
        "retry": waits,
        "retry_for_millis": int(retry_for * 1000),
        "break_after": break_after,
        "tls": tls,
        "server_name": server_name or os.environ.get("TENSORFERRY_SERVER_NAME") or "",
    }
    for name, path in (("ca", ca), ("cert", cert), ("key", key), ("token", token)):
        file = path or os.environ.get("TENSORFERRY_" + name.upper())
        if file:
            how[name] = os.path.abspath(file)
    return Client(how, timeout, memory)


def _named(what: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is a {type(given).__name__}; it must be a mapping of names, such as a dict")
    _strings(f"a name in {what}", given)


def _strings(what: str, given: Iterable[Any]) -> None:
    for text in given:
        if not isinstance(text, str):
            raise TypeError(f"{what} is {text!r}; it must be a str")
        _wire.encoded(text)


def _metadata(metadata: Optional[Mapping[str, Mapping[str, str]]]) -> Mapping[str, Mapping[str, str]]:
    if metadata is None:
        return {}
    _named("metadata", metadata)
    for name, entries in metadata.items():
        if entries:
            _named(f"metadata[{name!r}]", entries)
            _strings(f"a value in metadata[{name!r}]", entries.values())
    return metadata


def _seconds(timeout: float) -> None:
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; it is in seconds and more than 0, or None for no limit")


def _state(module: Any, prefix: str) -> dict[str, Any]:
    if not hasattr(module, "state_dict"):
        raise TypeError(f"a {type(module).__name__} is not a torch module")
    return {_under(prefix) + name: x for name, x in module.state_dict().items()}


def _under(prefix: str) -> str:
    """Return what names below a prefix begin with."""
    return prefix if not prefix or prefix.endswith("/") else prefix + "/"


def _literal(name: str) -> str:
    """Return the glob that selects a name alone."""
    return re.sub(r"[*?[\\]", r"\\\g<0>", name)


def _ports(said: Iterable[Mapping[str, Any]]) -> dict[str, Port]:
    dims = {"...": ANY_AXES, None: FREE}
    return {
        p["name"]: Port(
            tuple(p.get("dtypes") or ()), tuple(dims.get(n, n) for n in p["shape"]), "whole" in p, "optional" in p
        )
        for p in said
    }


def _params_of(said: Iterable[Mapping[str, str]]) -> dict[str, Param]:
    made = {}
    for p in said:
        kind, default = KINDS.get(p.get("kind", ""), p.get("kind", "")), p.get("default") or None
        value = default if isinstance(kind, str) else Param(kind).parse(p["name"], default)
        made[p["name"]] = Param(kind, value, p.get("meaning", ""))
    return made


def _params(params: Mapping[str, Any]) -> bytes:
    _named("params", params)
    return _wire.texts((k, str(v)) for k, v in params.items())


def _places(run: Run, out: Mapping[str, Out]) -> Iterable[tuple[str, Optional[_wire.Extent]]]:
    """Set the sinks of a run, and yield where each is in memory of the link, None if it is elsewhere."""
    _named("out", out)
    for name, place in out.items():
        if isinstance(place, (str, os.PathLike)) or hasattr(place, "seek"):
            run.sinks[name] = File(place)
            yield name, None
            continue
        into = _tensor.of(place, f"out[{name!r}]")
        if into.items is not None or (into.nbytes and not into.address):
            raise ValueError(f"out[{name!r}] is not dense and row-major")
        if not _tensor.is_writable(place):
            raise ValueError(f"out[{name!r}] is read-only")
        run.sinks[name] = place
        yield name, run.link.find(into.address, into.nbytes) if into.nbytes else None


def _warn_of_gradient(x: Any) -> None:
    global _has_warned
    if not _has_warned and x.requires_grad and sys.modules["torch"].is_grad_enabled():
        _has_warned = True
        warnings.warn(
            "an input requires a gradient, and none flows through a call; pass x.detach()", UserWarning, stacklevel=6
        )


def _stage(run: Run, source: Source, staged: Range) -> _wire.Extent:
    """Copy a small input to memory of the link, which is kept until the end."""
    run.staged.append(staged)
    source.write(staged.memory.base + staged.offset)
    return _wire.Extent(staged.memory.id, staged.offset, source.nbytes)


def _send(run: Run, packet: bytes) -> None:
    """Begin a run, whose feeds are open."""
    run.link.pending[run.id] = run
    try:
        run.link.send(packet)
        for feed in run.feeds:
            feed.pump(False)
    except BaseException:
        run.cancel()
        raise


def _sinks(run: Run, out: Mapping[str, Out]) -> bytes:
    parts = [len(out).to_bytes(2, "little")]
    for port, place in _places(run, out):
        parts += (_wire.text(port), b"\0" if place is None else b"\1", _wire.RANGE.pack(*(place or _wire.NOWHERE)))
    return b"".join(parts)


def _region(run: Run, got: Result, offset: int, length: int) -> Region:
    rows = None
    if got.shape:
        row = got.nbytes // got.shape[0] if got.shape[0] else 0
        rows = slice(-(-offset // row), (offset + length) // row) if row else slice(0, got.shape[0])
    if isinstance(got.sink, File):
        return Region(got.name, offset, length, rows, None, None)
    whole = run.tensor_of(got)
    data = None
    source = _tensor.of(whole)
    if length and source.address:
        part = (ctypes.c_ubyte * length).from_address(source.address + offset)
        part._keep = whole  # type: ignore[attr-defined]
        data = memoryview(part).cast("B")
    return Region(got.name, offset, length, rows, data, whole)


def _checked(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tensors of a push's or pull's answer. The first that failed is raised."""
    tensors: list[dict[str, Any]] = said.get("tensors") or []
    for t in tensors:
        if t.get("code"):
            raise _errors.from_code(int(t["code"]), {"message": f"{t.get('name')!r}: {t.get('error')}", **t})
    return tensors


def _copied(y: Any) -> Any:
    if isinstance(y, Tensor):
        return Tensor(bytearray(y.data), y.shape, y.dtype)
    return y.clone() if hasattr(y, "data_ptr") else y.copy()


def _deadline(timeout: Optional[float]) -> Optional[float]:
    return None if timeout is None else time.monotonic() + timeout


def _millis(timeout: float) -> int:
    return max(_link.millis(timeout), 1)  # 0 is none
