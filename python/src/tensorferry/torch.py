"""Train a torch module on a server as if it stood in this file.

import tensorferry as tf
from tensorferry.torch import RemoteModule, RemoteOptimizer

with tf.connect("127.0.0.1:50051") as client:
    trunk = RemoteModule(client, "trunk")
    optimizer = RemoteOptimizer(trunk.parameters(), "adam", lr=1e-3)
    with trunk.training():
        loss = criterion(top(trunk(bottom(x))), y)
        loss.backward()
        optimizer.step()
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
from torch.autograd.function import once_differentiable

from . import _train
from ._client import Call, Client
from ._errors import Error, FailedPrecondition, NotFound, Unavailable
from ._split import split
from ._tensor import having

__all__ = ["Handle", "RemoteModule", "RemoteOptimizer", "Rewound", "clip_grad_norm_", "split"]

_LOOK_SECONDS = 0.2  # between two looks whether the lease is free
_WARN_SECONDS = 60.0  # between two warnings of what went wrong beside a step
_RELEASES = 64  # ids of dropped graphs that one call names
_TEXT = 4 << 10  # characters of JSON that go as a param; more are an input


class Rewound(FailedPrecondition):
    """The server's module stands at another step than this client: its process was started anew, say.

    Bring your own modules to the same step, and go on from there.
    """

    def __init__(self, name: str, step: int, here: int):
        self.step = step
        super().__init__(
            f"model {name!r} stands at step {step}, this client at {here}",
            hint="load your own modules' state of that step, and go on with the batch that follows it",
        )


class Handle(torch.nn.Parameter):
    """A parameter of a module that is on a server: no values, but its name, shape and data type there.

    requires_grad says whether backward passes leave a gradient of it there.
    """

    remote: RemoteModule
    remote_name: str
    remote_shape: tuple[int, ...]
    remote_dtype: str

    def __new__(cls, remote: RemoteModule, name: str, dtype: str, shape: Iterable[int]) -> Handle:
        made: Handle = super().__new__(cls, torch.empty(0))
        made.remote, made.remote_name, made.remote_dtype, made.remote_shape = remote, name, dtype, tuple(shape)
        return made

    @property
    def grad(self) -> Any:
        raise TypeError(f"the gradient of {self.remote_name!r} is on the server: use a RemoteOptimizer, or grad_norm")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a handle is not copied: it stands for a parameter on a server")

    def __repr__(self) -> str:
        return f"<Handle of {self.remote_name!r}, {self.remote_dtype} {list(self.remote_shape)}>"


class RemoteModule(torch.nn.Module):
    """A module that a server has: its forward pass sends activations, its backward pass gradients.

    It is for one thread. timeout is of each call, in seconds. wire is the floating-point type that activations
    and gradients travel as, such as torch.bfloat16; as they are if it is None. on_rewind is called with the step that
    the server has gone back to, before Rewound is raised, and loads this side's modules of that step.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        timeout: Optional[float] = None,
        wire: Optional[torch.dtype] = None,
        on_rewind: Optional[Callable[[int], Any]] = None,
    ):
        super().__init__()
        served = {m.name: m for m in client.models()}
        if wire not in (None, torch.float32, torch.float64, torch.float16, torch.bfloat16):
            raise TypeError(f"wire={wire!r} is no floating-point type of torch")
        if name not in served:
            raise NotFound(f"the server has no model {name!r}", hint=f"it has {', '.join(sorted(served))}")
        if name + "/train" not in served:
            raise FailedPrecondition(f"model {name!r} does not train", hint=f"serve it with --python {name}=…,train")
        self._client, self._remote, self._timeout, self._wire = client, name, timeout, wire
        self._on_rewind = on_rewind
        self._warned = -math.inf
        self._inputs, self._outputs = served[name].inputs, list(served[name].outputs)
        self._token = ""
        self._step = 0  # that stands
        self._dropped: deque[str] = deque()  # graphs that nobody can use
        self._there: list[float] = []  # what it last said of where it stands
        self._pending: Optional[_Step] = None  # that was not sent, or of which nothing was heard
        self._fused: Optional[RemoteOptimizer] = None  # takes its steps with backward passes
        self._retain = False
        self._clear()
        # One more input, which stands for the parameters there: they need a gradient where no input does.
        self._own = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            self._accumulates = self._own.view_as(self._own).grad_fn.next_functions[0][0]
        self._handles: Optional[list[Handle]] = None

    def _clear(self) -> None:
        """Note that there are no gradients."""
        self._void = ""  # why those there are not to be used
        self._passes = 0  # that were confirmed since they were zero
        self._begun = 0  # that may have been
        self._scale = 1.0
        self._stepped = False  # with a backward pass, since the last step()
        self._asked = math.inf  # the step that may stand without this side

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # there are no parameters, buffers or modules to look for

    def __repr__(self) -> str:
        return f"RemoteModule({self._remote!r} at {self._client!r})"

    # Passes.

    def forward(self, *inputs: Any, **named: Any) -> Any:
        given = self._bind(inputs, named)
        needs = [n for n, x in given.items() if torch.is_tensor(x) and x.requires_grad]
        flows = torch.is_grad_enabled()
        if flows and (self._mode or needs):
            said = _Through.apply(self, list(given), self._seed(), *given.values(), self._own)
            return said[0] if len(said) == 1 else said
        if self._mode and self._token:
            results = self._forwarded(given, self._seed(), (), grad=False)[1]
        else:
            self._settle()
            results = self._run("", {n: self._sent(x, None) for n, x in given.items()}, {}).result()
        first = next(iter(given.values()))
        return self._one({n: self._received(results[n], first) for n in self._outputs})

    def _seed(self) -> int:
        return int(torch.randint(2**62, ()))

    def _bind(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        if len(inputs) > len(self._inputs):
            raise TypeError(f"{self._remote} has the inputs {', '.join(self._inputs)}; {len(inputs)} were given")
        given = {**dict(zip(self._inputs, inputs)), **named}
        missing = {n for n, p in self._inputs.items() if p.optional and given.get(n) is None}
        if set(given) | missing != set(self._inputs) or len(given) != len(inputs) + len(named):
            raise TypeError(f"{self._remote} has the inputs {', '.join(self._inputs)}; given were {', '.join(given)}")
        return {n: torch.as_tensor(given[n]) for n in self._inputs if n not in missing}

    def _sent(self, x: Any, wire: Optional[torch.dtype]) -> Any:
        if x.layout != torch.strided:
            raise TypeError(f"{self._remote} takes dense tensors, not {x.layout}; to_dense() makes one")
        dtype = wire if wire is not None and x.is_floating_point() else x.dtype
        if x.dtype is dtype and x.is_contiguous():
            return x.detach()
        return having(x.detach()).contiguous().to(dtype)

    def _received(self, y: Any, x: Any) -> Any:
        """A result beside an input: on its device, and of its type if it travelled as another."""
        if self._wire is None or y.dtype != self._wire:
            return y.to(x.device).data  # a view may not be changed in place everywhere
        return y.to(device=x.device, dtype=x.dtype if x.is_floating_point() else torch.get_default_dtype()).data

    def _one(self, results: Mapping[str, Any]) -> Any:
        values = tuple(results[n] for n in self._outputs)
        return values[0] if len(values) == 1 else values

    def _run(self, part: str, inputs: Mapping[str, Any], params: dict[str, Any], again: bool = True) -> Call:
        """Begins a call, which may be sent again: a step is known by its number, a forward pass by its seed."""
        if part and part != "lease" and "about" not in params:
            if not self._token:
                raise FailedPrecondition(
                    f"{self._remote} is not being trained here",
                    hint="use it in `with module.training():`; the model itself answers under no_grad",
                )
            params = {**params, "lease": self._token}
        return self._client.call(
            f"{self._remote}/{part}" if part else self._remote, inputs, params=params, timeout=self._timeout,
            like="torch", regions=False, idempotent=again,
        )  # fmt: skip

    def _ask(self, part: str, params: dict[str, Any], inputs: Optional[Mapping[str, Any]] = None) -> Mapping[str, Any]:
        """Run a part, once more if the server had only forgotten who trains."""
        self._settle()
        try:
            results: Mapping[str, Any] = self._run(part, inputs or {}, params).result()
        except Error as err:
            if not self._token or not (self._look(err) or ("discard" in params and self._there)):
                raise
            results = self._run(part, inputs or {}, params).result()
        return results

    def _train(
        self, given: Mapping[str, Any], seed: int, needs: Iterable[str], step: Optional[_Step] = None,
        grad: bool = True, **order: str,
    ) -> Call:  # fmt: skip
        """Begins a forward pass that keeps its graph, or none without grad, after a step if there is one."""
        wire = self._wire if grad else None
        how = {"retain": self._retain, "eval": not self._mode, "wire": wire and str(wire).partition(".")[2]}
        params: dict[str, Any] = {"seed": seed, **order, **{name: value for name, value in how.items() if value}}
        if not grad:
            params["grad"] = "false"
        lists: dict[str, Any] = {
            "frozen": [h.remote_name for h in self._handles or () if not h.requires_grad],
            "release": [self._dropped.popleft() for _ in range(min(len(self._dropped), _RELEASES))],
            "step": step and step.said,
        }
        lists = {name: of for name, of in lists.items() if of}
        if grad and list(needs) != [n for n, x in given.items() if _train.differentiable(x)]:
            lists["needs"] = list(needs)
        sent = {n: self._sent(x, wire) for n, x in given.items()}
        _say(lists, "lists", params, _train.LISTS, sent)
        return self._run("forward", sent, params)

    def _backward(
        self,
        forward: str,
        gradients: Mapping[str, Any],
        step: Optional[_Step] = None,
        alone: bool = False,
        **order: str,
    ) -> Call:
        """Begins a backward pass. A gradient that is None is of an output that nothing used."""
        sent = {n: torch.empty(0) if g is None else self._sent(g, self._wire) for n, g in gradients.items()}
        params: dict[str, Any] = {"forward": forward, "absent": True, **({"alone": True} if alone else {}), **order}
        _say(step and {"step": step.said}, "lists", params, _train.LISTS, sent)
        self._begun += not (alone or step)
        try:
            return self._run("backward", sent, params, again=step is not None)
        except BaseException:
            self._void = "a backward pass was not confirmed"
            raise

    def _confirmed(self, call: Call, alone: bool = False) -> Mapping[str, Any]:
        try:
            results: Mapping[str, Any] = call.result()
        except BaseException as err:
            self._void = "a backward pass failed, or was not confirmed"
            if isinstance(err, Error):
                self._look(err)
            raise
        self._passes += not alone
        return results

    def _advanced(self, forward: str, gradients: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of a backward pass after which the server steps. One that is lost is asked for again."""
        if self._stepped or self._begun:
            self._plain("accumulated gradients")
        assert self._fused is not None
        step = self._next(self._fused._kind, self._fused._groups())
        self._void, self._asked = "a backward pass failed, or was not confirmed", step.n
        try:
            results: Mapping[str, Any] = self._backward(forward, gradients, step).result()
        except Error as err:
            if self._stands(err) != step.n:
                self._compare(err)
                raise
            results = self._backward(forward, gradients, step).result()
        self._step, self._void, self._stepped, self._asked = step.n, "", True, math.inf
        return results

    def _plain(self, what: str) -> None:
        """Raises if steps are taken with backward passes."""
        if self._fused is not None:
            why = "is fused: the server steps after each backward pass, which does not go with"
            raise FailedPrecondition(f"the optimizer of {self._remote} {why} {what}", hint="make it without fused")

    def _forwarded(self, given: Mapping[str, Any], seed: int, needs: Iterable[str], grad: bool = True) -> _Passed:
        """A forward pass, which is run again if the server had only forgotten who trains."""
        step = self._pending
        call = self._train(given, seed, needs, step, grad=grad)
        try:
            return self._results(call, step)
        except Error as err:
            if (step and self._step != step.n) or not self._look(err):
                raise
        return self._results(self._train(given, seed, needs, grad=grad))

    def _results(self, call: Call, step: Optional[_Step] = None) -> _Passed:
        """What became of a forward pass, and of the step with it, if there is one."""
        try:
            results: dict[str, Any] = call.result()
        except Error as err:
            self._taken(step, err)
            raise
        self._taken(step)
        said = results.pop(_train.SAID)
        told = json.loads(bytes(said.tolist()) or "{}")
        self._warn(told.get("warning"))
        without = told.get("without", ())
        return call.id, results, [n for n, y in results.items() if _train.differentiable(y) and n not in without]

    def _look(self, err: Error) -> bool:
        """After an error, see where the server stands. It reports whether nothing is lost."""
        self._there = []
        if not isinstance(err, (FailedPrecondition, Unavailable)):
            return False
        self._stands(err)
        return self._compare(err)

    def _stands(self, err: Error) -> int:
        """Take the lease anew, and return the step that stands."""
        try:
            self._there = self._take()
        except Error:
            raise err from None
        return int(self._there[0])

    def _compare(self, err: Optional[Error]) -> bool:
        """Compare what stands there with this side, and report whether nothing is lost."""
        stands, _, _, passes = self._there
        if stands != self._step:
            here, self._step = self._step, int(stands)
            self._clear()
            if self._on_rewind is not None:
                self._on_rewind(self._step)
            raise Rewound(self._remote, self._step, here) from err
        if passes != self._passes:
            self._void = self._void or "the server has lost gradients"
        return passes == self._passes

    @contextlib.contextmanager
    def retain_graph(self) -> Iterator[None]:
        """Within it, graphs of forward passes are kept after a backward pass, for loss.backward(retain_graph=True)."""
        self._plain("retained graphs")
        before, self._retain = self._retain, True
        try:
            yield
        finally:
            self._retain = before

    @contextlib.contextmanager
    def pipeline(self, depth: int) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
        """Within it, several micro-batches are on their way at a time.

            with trunk.pipeline(4) as micro:
                for i, h in enumerate(micro(bottom(x) for x in batches)):
                    criterion(top(h), labels[i]).backward()

        micro takes what bottom returns and yields what the server's module makes of it, in order, as tensors of
        their own: a backward pass of yours ends there. The gradients travel while you go on, and reach bottom
        when they have come back; all have at the end of the loop.
        """
        self._plain("a pipeline, whose gradients accumulate")
        if depth < 1:
            raise ValueError(f"a pipeline of {depth} micro-batches; 1 is the least")
        yield lambda micro: self._micro(iter(micro), depth)

    def _micro(self, micro: Iterator[Any], depth: int) -> Iterator[Any]:
        forwards: deque[tuple[int, dict[str, Any], Call, Optional[_Step]]] = deque()  # by their turns
        backwards: deque[tuple[int, dict[str, Any], Call]] = deque()
        series, turns, carried = secrets.token_hex(8), 0, None

        def back(before: int) -> None:
            """Takes the gradients that have come, and waits for those of passes before a turn."""
            while backwards and (backwards[0][0] < before or backwards[0][2].done()):
                _, given, call = backwards.popleft()
                _push_back(given, self._confirmed(call))

        try:
            more = True
            while more or forwards:
                while more and len(forwards) < depth:
                    x = next(micro, _END)
                    more = x is not _END
                    if more:
                        given = self._bind(x if isinstance(x, tuple) else (x,), {})
                        needs = [n for n, t in given.items() if t.requires_grad]
                        step, carried = self._pending if self._pending is not carried else None, self._pending
                        call = self._train(given, self._seed(), needs, step, order=f"{series}.{turns}")
                        forwards.append((turns, given, call, step))
                        turns += 1
                if not forwards:
                    break
                turn, given, call, step = forwards.popleft()
                back(turn)  # what runs before it, is heard of before it: a pass that is lost would keep it waiting
                try:
                    id, outputs, flowing = self._results(call, step)
                except Error as err:
                    self._look(err)
                    raise
                first = next(iter(given.values()))
                values = {n: self._received(outputs[n], first) for n in self._outputs}
                leaves = {n: values[n].requires_grad_() for n in flowing}
                with torch.enable_grad():
                    yielded = {**values, **{n: _train.Joint.apply(leaf) for n, leaf in leaves.items()}}
                yield self._one(yielded)
                gradients = {n: y.grad if n in leaves else None for n, y in values.items()}
                if all(g is None for g in gradients.values()):
                    self._dropped.append(id)
                else:
                    backwards.append((turns, given, self._backward(id, gradients, order=f"{series}.{turns}")))
                    turns += 1
            back(turns)
        except BaseException:
            self._void = self._void or "a pipeline was left"
            for call in (*(f[2] for f in forwards), *(b[2] for b in backwards)):
                call.cancel()
            raise

    # The lease, and steps.

    @property
    def training(self) -> Any:
        """Whether the module is in train mode; called, it takes the lease for a with block.

        training(wait=60) waits so many seconds for a client that trains to end.
        """
        mode = _Mode(self._mode)
        mode.lease = self._lease
        return mode

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_mode"] = bool(mode)

    @contextlib.contextmanager
    def _lease(self, wait: float = 0.0) -> Iterator[RemoteModule]:
        if self._token:
            raise FailedPrecondition(f"{self._remote} is being trained here already")
        self._token = secrets.token_hex(16)
        deadline = time.monotonic() + wait
        try:
            while True:
                try:
                    stands = int(self._take(**({"wait": "true"} if wait else {}))[0])
                    break
                except FailedPrecondition:
                    if not time.monotonic() < deadline:  # NaN is over, too
                        raise
                    time.sleep(_LOOK_SECONDS)
            here, self._step, asked = self._step, stands, self._asked
            self._clear()
            if stands < here or stands >= asked:  # it was started anew, or an answer lost, between two turns
                if self._on_rewind is None:
                    raise Rewound(self._remote, stands, here)
                self._on_rewind(stands)
            try:
                yield self
            except BaseException:
                with contextlib.suppress(Error, ValueError):
                    self._settle()
                raise
            self._settle()
        finally:
            with contextlib.suppress(Error, ValueError):  # it ends with the session
                self._take(end="true")
            self._client._ends.discard(self._settle)
            self._token, self._pending = "", None
            self._dropped.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that have been accumulated since the last step."""
        there = self._ask("step", {"discard": "true"})["y"].tolist() if self._begun or self._void else None
        self._clear()
        if there:
            self._there = there
            self._compare(None)  # a backward pass of which nothing was heard may have stepped

    def grad_norm(self) -> tuple[float, bool]:
        """Return the norm of the gradients there, and whether all are finite."""
        _, square, finite, _ = self._ask("step", {"norm": "true"})["y"].tolist()
        return square**0.5, bool(finite)

    def _next(self, kind: str, groups: list[Any], scale: float = 1.0, clip_value: float = 0.0) -> _Step:
        """The step that uses up the gradients there."""
        if self._void:
            raise FailedPrecondition(
                self._void + ": the gradients are not whole", hint="zero_grad, and run the passes again"
            )
        self._settle()
        said = {"n": self._step + 1, "passes": self._passes, "optimizer": kind, "groups": groups}
        more = {"scale": (self._scale * scale, 1.0), "clip_value": (clip_value, 0.0)}
        said.update({name: repr(value) for name, (value, usual) in more.items() if value != usual})
        step = _Step(self._step + 1, said, self._passes, self._scale)
        self._clear()
        return step

    def _settle(self) -> None:
        """Have the step taken that is pending."""
        step = self._pending
        if step is None:
            return
        params, inputs, said = dict(step.said), dict[str, Any](), dict[str, Any]()
        _say(params.pop("groups"), "groups", params, "groups", inputs)
        try:
            said = self._run("apply" if inputs else "step", inputs, params).result()
        except Error as err:
            self._taken(step, err)
        self._taken(step)
        self._warn(bytes(said["warning"].tolist()).decode() if "warning" in said else "")

    def _taken(self, step: Optional[_Step], err: Optional[Error] = None) -> None:
        """Note that a step stands; after an error of its call, see whether it does, and raise the error if not."""
        if step is None or self._pending is not step:
            return
        # Where Ctrl-C comes before, the next use asks again; where it or an error comes now, zero_grad sees.
        void, self._void, self._asked, self._pending = self._void, "a step was not confirmed", step.n, None
        stands = step.n if err is None else self._stands(err)
        self._void, self._asked = void, math.inf
        if err is not None and stands != step.n:
            if step.passes:
                self._passes, self._begun, self._scale = step.passes, step.passes, step.scale
            self._compare(err)
            raise err
        self._step = step.n

    def _warn(self, warning: Optional[str]) -> None:
        if warning and time.monotonic() - self._warned > _WARN_SECONDS:
            self._warned = time.monotonic()
            warnings.warn(f"{self._remote}: {warning}", RuntimeWarning, stacklevel=5)

    def _take(self, **params: Any) -> list[float]:
        """Take the lease, or give it up, and return what the server says of the step that stands."""
        stands: list[float] = self._run("lease", {}, {"token": self._token, **params}).result()["y"].tolist()
        return stands

    @property
    def step(self) -> int:
        """The number of steps that the server's module has taken."""
        self._settle()
        return self._step

    def rewind(self, step: int) -> None:
        """Go back to the server's checkpoint of a step. What belongs to this side you load yourself."""
        self._ask("step", {"rewind": step})
        self._step = step
        self._clear()

    def release(self) -> None:
        """Free the graphs of forward passes whose outputs are gone."""
        while self._dropped:
            ids = [self._dropped.popleft() for _ in range(min(len(self._dropped), _RELEASES))]
            self._ask("release", {"forwards": ",".join(ids)})

    # What a module has.

    def _describe(self) -> list[list[Any]]:
        found: list[list[Any]] = json.loads(bytes(self._ask("state", {"about": "true"})["about"].tolist()))["tensors"]
        return found

    def named_parameters(self, prefix: str = "", recurse: bool = True, **_: Any) -> Iterator[tuple[str, Any]]:
        """Yield handles of the parameters on the server, which have no values."""
        if self._handles is None:
            self._handles = [Handle(self, n, dt, sh) for n, dt, sh, own in self._describe() if own]
        for handle in self._handles:
            yield (prefix + "." if prefix else "") + handle.remote_name, handle

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        for _, handle in self.named_parameters():
            yield handle

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Fetch the parameters and buffers of the server's module."""
        found = {} if destination is None else destination
        found.update({prefix + n: t for n, t in self._fetch("model").items()})
        return found

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *more: Any) -> None:
        """Load this module's part of a state dict of a module that it is a part of."""
        self.load_state_dict({n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)})

    def _apply(self, *args: Any, **kwargs: Any) -> RemoteModule:
        """Leave the module where it is: to, cuda, half and the like are for modules of this process."""
        return self

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a RemoteModule has its parts on the server: change them where the module is made")

    add_module = register_module = register_parameter = register_buffer = apply = _refused
    buffers = named_buffers = share_memory = _refused

    def __reduce__(self) -> Any:
        raise TypeError("a RemoteModule is not copied or pickled: make another from a client")

    def optimizer_state(self) -> dict[str, Any]:
        """Fetch the tensors of the server's optimizer, as NUMBER.NAME."""
        return self._fetch("optimizer")

    def _fetch(self, what: str) -> dict[str, Any]:
        if not self._token:
            with self._lease():
                return self._fetch(what)
        got = self._ask("state", {"what": what})
        said = json.loads(bytes(got["about"].tolist()))["tensors"]
        like = {n: torch.empty(sh, dtype=getattr(torch, dt)) for n, dt, sh, _ in said}
        return dict(zip(like, _train.unpack_tensors(got["y"], like)))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Replace all parameters and buffers of the server's module, or none. Names, types and shapes must match."""
        if not strict:
            raise NotImplementedError("a remote module loads all of a state dict, or nothing; leave strict=True")
        about = _train.octets_of(json.dumps(_train.describe(state, ())))
        self._ask("load", {}, {"y": _train.pack_tensors(state.values()), "about": about})
        return torch.nn.modules.module._IncompatibleKeys([], [])


# The id of a forward pass, its outputs, and which of them have a graph.
_Passed = tuple[str, Mapping[str, Any], list[str]]


class _Step(NamedTuple):
    """A step as calls say it, and what it uses up."""

    n: int
    said: dict[str, Any]
    passes: int
    scale: float


def _say(said: Any, name: str, params: dict[str, Any], port: str, inputs: dict[str, Any]) -> None:
    """Has a call say something as JSON: in a param, or in an input if it is long."""
    text = json.dumps(said) if said else ""
    if len(text) > _TEXT:
        inputs[port] = _train.octets_of(text)
    elif text:
        params[name] = text


class _Mode(int):
    lease: Callable[[float], Any]

    def __call__(self, wait: float = 0.0) -> Any:
        return self.lease(wait)


_END = object()


def _push_back(given: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
    """Hands gradients to what made the inputs."""
    xs = {n: x for n, x in given.items() if x.requires_grad and not _train.is_absent(gradients[n], x.shape)}
    if xs:
        torch.autograd.backward(list(xs.values()), [gradients[n].to(x) for n, x in xs.items()])


class _Node:
    """Lives as long as autograd may run a backward pass."""

    def __init__(self, remote: RemoteModule, id: str):
        self.remote, self.id, self.used = remote, id, False

    def __del__(self) -> None:
        if not self.used:
            self.remote._dropped.append(self.id)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, remote: RemoteModule, names: list[str], seed: int, *tensors: Any) -> Any:
        given = dict(zip(names, tensors))
        needs = [n for n, needed in zip(names, ctx.needs_input_grad[3:]) if needed]
        id, results, flowing = remote._forwarded(given, seed, needs)
        ctx.node, ctx.names = _Node(remote, id), names
        ctx.given = {n: (x.dtype, x.device, x.shape) for n, x in given.items()}
        values = tuple(remote._received(results[n], tensors[0]) for n in remote._outputs)
        ctx.mark_non_differentiable(*[v for n, v in zip(remote._outputs, values) if n not in flowing])
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        node, remote = ctx.node, ctx.node.remote
        if not remote._retain:
            node.used = True
        # torch.autograd.grad, and backward(inputs=…), leave the parameters alone.
        alone = not torch._C._will_engine_execute_node(remote._accumulates)
        remote._settle()
        given = dict(zip(remote._outputs, gradients))
        if remote._fused is None or alone:
            got = remote._confirmed(remote._backward(node.id, given, alone=alone), alone)
        else:
            got = remote._advanced(node.id, given)
        back = [
            got[n].to(dtype=ctx.given[n][0], device=ctx.given[n][1])
            if needed and not _train.is_absent(got[n], ctx.given[n][2])
            else None
            for n, needed in zip(ctx.names, ctx.needs_input_grad[3:])
        ]
        return (None, None, None, *back, None)


class RemoteOptimizer(torch.optim.Optimizer):
    """An optimizer on the server, over handles of a RemoteModule's parameters. torch's schedulers take it.

    kind is "sgd", "momentum", "adam", "adamw", or one of torch's classes SGD, Adam and AdamW. options are
    theirs. A step uses the gradients up; they are zero after it. A fused optimizer has the server step after each
    backward pass, in the same call: step() tells it only that the next one may come.
    """

    def __init__(self, params: Iterable[Any], kind: Union[str, type] = "sgd", *, fused: bool = False, **options: Any):
        self._kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "").lower()
        if kind == "momentum":
            options.setdefault("momentum", 0.9)
        # What torch's own takes, and has beside what is given: schedulers look for betas.
        made_by = _train._OPTIMIZERS.get(self._kind)
        if made_by is None:
            raise TypeError(f"no optimizer {kind!r}; there are {', '.join(_train._OPTIMIZERS)}")
        options.setdefault("lr", 1e-3)
        self._given = made_by([torch.empty(1)], lr=options["lr"]).defaults
        self._module: Optional[RemoteModule] = None
        self._all = False
        super().__init__(list(params), made_by([torch.empty(1)], **options).defaults)
        handles = sum(len(g["params"]) for g in self.param_groups)
        assert self._module is not None
        self._remote: RemoteModule = self._module
        self._remote._fused = self if fused else None  # the one made last counts
        self._all = len(self.param_groups) == 1 and handles == len(list(self._remote.parameters()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of handles, with options of its own."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not isinstance(p, Handle) or self._module not in (None, p.remote):
                del self.param_groups[-1]
                raise TypeError("a RemoteOptimizer is for the parameters of one RemoteModule; use torch's for your own")
            self._module = p.remote
        self._all = False

    def _groups(self) -> list[Any]:
        said = []
        for g in self.param_groups:
            group = {k: g[k] for k, usual in self._given.items() if k == "lr" or g[k] != usual}
            if not self._all:
                group["params"] = [h.remote_name for h in g["params"]]
            said.append({k: v.item() if torch.is_tensor(v) else v for k, v in group.items()})
        return said

    def step(
        self,
        closure: Optional[Callable[[], Any]] = None,
        *,
        wait: bool = True,
        scale: float = 1.0,
        clip_value: float = 0.0,
    ) -> Any:
        """Apply the gradients, each multiplied by scale and then bounded by clip_value.

        Without wait it goes with the next forward pass, or before any other use of the module, which has its error.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        remote = self._remote
        if remote._fused is self:
            if scale != 1.0 or clip_value:
                remote._plain("scaled or clipped gradients")
            remote._stepped = False
            return loss
        remote._pending = remote._next(self._kind, self._groups(), scale, clip_value)
        if wait:
            remote._settle()
        else:
            remote._client._ends.add(remote._settle)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._remote.zero_grad()


def clip_grad_norm_(parameters: Iterable[Any], *remotes: RemoteModule, max_norm: float) -> float:
    """Scale the gradients of parameters here and of remote modules so that the norm of all is at most max_norm.

    It returns the norm before. The remote ones are scaled by their next step.
    """
    if math.isnan(max_norm):
        raise ValueError("max_norm is NaN")
    local = [p.grad for p in parameters if p.grad is not None]
    square = sum(float(_train.squares(g)) for g in local)
    for remote in remotes:
        remote._plain("clipped gradients")
        square += remote.grad_norm()[0] ** 2
    total = float(square**0.5)
    factor = min(1.0, max_norm / (total + 1e-6))
    if factor < 1.0:
        for g in local:
            g.mul_(factor)
        for remote in remotes:
            remote._scale *= factor
    return total
