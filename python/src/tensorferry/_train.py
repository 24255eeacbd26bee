"""Trains a torch module for remote clients: what a worker keeps between the calls of its companion models.

docs/training.md names the models, and says what each does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import inspect
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Callable, Optional

import torch

from ._model import FREE, Call, ModelError, Param, Port, Prepared, named_results
from ._tensor import Like, having, storage

LEASE_SECONDS = 30.0  # how long a trainer that is cut off keeps others out
GRAPH_SECONDS = 600.0  # the age at which a graph is dropped
GRAPHS = 1024  # of all sessions
WAITING_SECONDS = 1.0  # a client that waits for the lease asks again within this time
ABOUT_BYTES = 4096  # of a description, beside twice that of the module; of lists, beside their share of each parameter
LIST_BYTES = 512  # of lists, for each parameter, beside 8 for each character of its name
NUMBER = torch.finfo(torch.float32).max  # the largest option of an optimizer
REASONS = 4096  # graphs that are gone, of which it is known why
CHECKPOINTS = 2  # that are kept
LISTS, SAID = "/lists", "/said"  # ports beside the module's own
_FLOATS = ("float32", "float64", "float16", "bfloat16")
# Backward passes run on the thread that computes. The one thread that torch has for a device's backward passes
# would not do: with a client in the same process it waits for this very pass. torch 1 has no such switch, and its
# reader of weights alone knows no floats.
_threads = getattr(torch.autograd, "set_multithreading_enabled", lambda mode: contextlib.nullcontext())
_TORCH2 = hasattr(torch.autograd, "set_multithreading_enabled")
_NOTHING = torch.empty(0)
_MODIFIED = "the module modifies in place what a backward pass needs"
_OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_STEP: dict[str, Param] = {
    "n": Param(int, 0, "number of the step, 1 more than that of the last"),
    "passes": Param(int, -1, "backward passes that the gradients must be of; -1: any number"),
    "optimizer": Param(str, "sgd", "sgd, momentum, adam or adamw"),
    "scale": Param(float, 1.0, "factor for the gradients"),
    "clip_value": Param(float, 0.0, "bound of each gradient"),
}


class Refused(ModelError):
    """A call that the state of the model does not allow, with what to do first."""

    code = 9  # FAILED_PRECONDITION


class Invalid(ModelError):
    """A call that makes no sense."""

    code = 3  # INVALID_ARGUMENT


class Trainer:
    """How a module trains. A model may return an instance of a class of its own, with other passes or another step."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.optimizer: Optional[torch.optim.Optimizer] = None
        self.said: Any = None  # what it was made of
        self.options: Any = None  # that it has

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.forward(*inputs, **named)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns the outputs, with their graph."""
        return self.module(*inputs, **named)

    def backward(self, outputs: list[Any], gradients: list[Any], retain: bool) -> None:
        """Adds to the gradients of the parameters, and of the inputs."""
        with _threads(False):
            torch.autograd.backward(outputs, gradients, retain_graph=retain)

    def step(self, options: Mapping[str, Any]) -> None:
        """Applies the gradients. options has the name of the optimizer and its groups."""
        assert self.optimizer is not None
        self.optimizer.step()

    def prepare(self, options: Mapping[str, Any]) -> None:
        """Has the optimizer be as options say, or raises and leaves it as it was. A step of another kind needs none."""
        if type(self).step is not Trainer.step or self.options == options:
            return
        groups = [dict(g) for g in options["groups"]]
        said = (options["optimizer"], [g.pop("params", None) for g in groups])
        made = self.made(said, groups)
        if self.said != said:
            self.optimizer, self.said = made, said
        assert self.optimizer is not None
        for have, new in zip(self.optimizer.param_groups, made.param_groups):
            have.update({name: value for name, value in new.items() if name != "params"})
        self.options = options

    def made(self, said: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """An optimizer of the kind and for the parameters of said."""
        kind, parts = said
        known = dict(self.module.named_parameters())
        unknown = [name for names in parts for name in names or () if name not in known]
        if unknown:
            raise Invalid(f"the module has no parameter {unknown[0]!r}")
        made_by = _OPTIMIZERS.get(kind)
        if made_by is None:
            raise Invalid(f"no optimizer {kind!r}; there are {', '.join(_OPTIMIZERS)}")
        takes = inspect.signature(made_by).parameters  # torch takes any in a group
        wrong = [name for g in groups for name in g if name not in takes]
        if wrong:
            raise Invalid(f"optimizer {kind!r} takes no {wrong[0]}")
        try:
            kinds = {(p.dtype, p.device) for p in known.values() if differentiable(p)}
            for g, names in zip(groups, parts):
                g.update({name: tuple(v) for name, v in g.items() if isinstance(v, list)})
                like = [torch.zeros(1, dtype=t, device=d, requires_grad=True) for t, d in kinds]
                tried = made_by(like or [torch.zeros(1)], **{"lr": 0.01, **g})  # torch looks at these alone
                for p in like:
                    p.grad = torch.ones_like(p)
                tried.step()  # of numbers that the types do not have it raises
                tried.step()  # the first has no momentum
                g["params"] = [known[name] for name in names] if names is not None else list(known.values())
            return made_by(groups, lr=0.01)
        except (TypeError, ValueError, RuntimeError) as err:
            raise Invalid(f"no optimizer {kind!r} with such options: {err}") from None

    def state(self) -> dict[str, Any]:
        """What the optimizer needs to go on, beside the module's own state."""
        return {"said": self.said, "optimizer": None if self.optimizer is None else self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what state returned, or raises and goes on as before."""
        made = None
        if state["optimizer"] is not None:
            made = self.made(state["said"], [{} for _ in state["said"][1]])
            made.load_state_dict(state["optimizer"])
        self.optimizer, self.said, self.options = made, state["said"], None


@dataclasses.dataclass
class Graph:
    """A forward pass that waits for its backward pass."""

    inputs: dict[str, Any]
    outputs: dict[str, Any]
    bytes: int
    session: int
    retain: bool
    seed: Optional[int]
    wire: Optional[torch.dtype]  # what floating-point tensors travel as
    born: float


class Training:
    """A module that trains, what it keeps, and who trains it."""

    def __init__(self, trainer: Trainer, device: str, options: Mapping[str, Any]) -> None:
        self.trainer, self.module, self.device = trainer, trainer.module, device
        self.lease_seconds = LEASE_SECONDS if options.get("lease") is None else float(options["lease"])
        self.folder = pathlib.Path(options["checkpoint"]) if options.get("checkpoint") else None
        self.every = int(options.get("checkpoint_every") or 100)
        self.room = 0  # bytes that graphs may have; the worker says it
        self.graphs: dict[str, Graph] = {}
        self.reasons: dict[str, str] = {}  # why a graph is gone
        self.bytes = self.most = 0
        self.counts = dict.fromkeys(("used", "evicted", "expired", "missed", "failed"), 0)
        self.steps = 0
        self.saved = 0  # the step of the last checkpoint; without any the module is as it was made
        self.last: tuple[str, int] = ("", 0)  # token and number of the last step
        self.answer: dict[str, Any] = {}  # of the backward pass with that step, until another pass
        self.frozen: list[str] = []
        self.unsaved = ""  # why the last step has no checkpoint
        self.parameters = list(self.module.parameters())
        self.needed = {name: p.requires_grad for name, p in self.module.named_parameters()}
        self.lists = ABOUT_BYTES + sum(8 * len(name) + LIST_BYTES for name in self.needed)
        self.type = next((p.dtype for p in self.parameters if p.is_floating_point()), torch.float32)
        self.own: Optional[set[int]] = None  # where the module's tensors are, which no graph is charged for
        self.passes = 0  # backward passes since the gradients were zero
        self.void = ""  # why the gradients that are there are not to be used
        self.token = ""
        self.session = 0
        self.cut = 0.0  # when the session of the lease ended; 0: it has not
        self.line: dict[str, float] = {}  # tokens that wait for the lease, and when they last asked
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(self.folder, os.O_RDONLY)
            try:
                self.resume()
            except BaseException:
                os.close(self.lock)
                raise

    def resume(self) -> None:
        """Goes on from the last checkpoint, if there is one, in a folder that is this process's alone."""
        assert self.folder is not None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process keeps its checkpoints in {self.folder}") from None
        for half in self.folder.glob("*.new"):
            half.unlink()
        stands = self.checkpoints()
        if stands:
            self.rewind(stands[-1])
            print(f"goes on from step {self.steps}, of {self.folder}")

    def close(self) -> None:
        """Writes the last checkpoint."""
        if self.folder is not None:
            self.attempt()
            os.close(self.lock)

    def infer(self, *inputs: Any, **named: Any) -> Any:
        """The module's own model: the weights of the last step, in eval mode."""
        self.mode(False)
        return self.trainer.forward(*inputs, **named)

    def mode(self, train: bool) -> None:
        if self.module.training != train:
            self.module.train(train)

    @contextlib.contextmanager
    def seeded(self, seed: Optional[int]) -> Iterator[None]:
        """As torch.random.fork_rng, with a seed, if there is one: in a fifth of the time on a CPU."""
        if seed is None:
            yield
        elif self.device == "cpu":
            state = torch.default_generator.get_state()
            torch.default_generator.manual_seed(seed)
            try:
                yield
            finally:
                torch.default_generator.set_state(state)
        else:
            with torch.random.fork_rng([torch.device(self.device)]):
                torch.manual_seed(seed)
                yield

    # The lease.

    def held(self) -> bool:
        """Whether a client trains."""
        if self.token and self.cut and time.monotonic() - self.cut > self.lease_seconds:
            self.drop("the client that trained was cut off")
            self.token = ""
        return bool(self.token)

    def drop(self, why: str) -> None:
        """Ends what a trainer leaves: its graphs, and gradients that are not applied."""
        for id in list(self.graphs):
            self.forget(id, why)
        self.zero()

    def take(self, call: Call, _: Any, token: str, end: bool, wait: bool) -> Any:
        """NAME/lease."""
        if not token:
            raise Invalid("param token is missing: a text that only this client knows")
        if not call.session:
            raise Refused("a lease is a session's, and this call has none")
        now = time.monotonic()
        self.line = {t: asked for t, asked in self.line.items() if now - asked < WAITING_SECONDS}
        if wait:
            self.line[token] = now
        if not end and not self.held() and next(iter(self.line), token) != token:
            raise Refused("another client waits for the lease; wait for it, too")
        if self.held() and token != self.token:
            cut = f", cut off for {time.monotonic() - self.cut:.0f} s" if self.cut else ""
            raise Refused(
                f"another client trains{cut}; wait until it ends, or {self.lease_seconds:.0f} s after it is cut off"
            )
        if end and token == self.token:
            self.drop("the client that trained has ended")
            self.token = ""
        elif not end:
            self.token, self.session, self.cut = token, call.session, 0.0
            self.line.pop(token, None)
        return self.state()

    def check(self, call: Call, token: str) -> None:
        """Raises unless the caller trains."""
        if not self.held() or token != self.token:
            who = "another client trains" if self.token else "nobody trains"
            raise Refused(
                f"{who}; step {self.steps} stands: take the lease (with trunk.training()) and look at the step first"
            )
        if not call.session:
            raise Refused("a graph is kept for a session, and this call has none")
        self.session, self.cut = call.session, 0.0

    def gone(self, session: int) -> None:
        """Frees what a session has, which has ended."""
        for id in [id for id, g in self.graphs.items() if g.session == session]:
            self.forget(id, "its session has ended")
        if self.token and session == self.session:
            self.cut = time.monotonic()

    # Graphs.

    def forget(self, id: str, why: str, count: str = "") -> None:
        graph = self.graphs.pop(id, None)
        if graph is None:
            return
        self.bytes -= graph.bytes
        if count:
            self.counts[count] += 1
        self.reasons[id] = why
        if len(self.reasons) > REASONS:
            del self.reasons[next(iter(self.reasons))]

    def tidy(self) -> Optional[float]:
        """Drops what is too old, and returns when something else will be."""
        now = time.monotonic()
        while self.graphs and now - next(iter(self.graphs.values())).born >= GRAPH_SECONDS:
            self.forget(next(iter(self.graphs)), f"it was kept for {GRAPH_SECONDS:.0f} s", "expired")
        due = [next(iter(self.graphs.values())).born + GRAPH_SECONDS] if self.graphs else []
        if self.held() and self.cut:
            due.append(self.cut + self.lease_seconds)
        return min(due, default=None)

    def train(self, call: Call, inputs: dict[str, Any], needs: str, frozen: str, release: str, **params: Any) -> Any:
        """NAME/train."""
        wanted = set(needs.split(",")) if needs != "*" else set(inputs)
        lists = wanted, frozen.split(",") if frozen else [], release.split(",")
        return self.forward(call, inputs, lists, **params)[0]

    def listed(self, call: Call, given: dict[str, Any], lease: str, lists: str, grad: bool, **params: Any) -> Any:
        """NAME/forward, after a step if it has one. It says what is unusual of its outputs, and of the step before."""
        self.check(call, lease)
        said, step = self.heard(given, lists)
        if step:
            self.stepped(lease, **step)
        wanted, frozen, release = (list(map(str, said.get(name, ()))) for name in ("needs", "frozen", "release"))
        whole = wanted if "needs" in said else given, frozen, release
        outputs, graph_of = self.forward(call, given, whole, lease, grad=grad, **params)
        flat = [n for n, y in graph_of.items() if not getattr(y, "requires_grad", False)]
        without = [n for n in flat if differentiable(torch.as_tensor(graph_of[n]))]
        told = {k: v for k, v in (("without", grad and without), ("warning", self.unsaved)) if v}
        return {**outputs, SAID: octets_of(json.dumps(told) if told else "")}

    def forward(
        self, call: Call, inputs: dict[str, Any], lists: tuple[Container[str], list[str], Iterable[str]], lease: str,
        seed: Optional[int], retain: bool, eval: bool, wire: str, order: str, grad: bool = True,
    ) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
        """The outputs as they travel, and as they are; without grad there is no graph."""
        wanted, frozen, release = lists
        self.check(call, lease)
        if seed is not None and not 0 <= seed < 1 << 63:
            raise Invalid(f"seed {seed} is not between 0 and 2⁶³-1")
        if seed is not None:  # the same pass again: its client did not hear of the first
            for id in [id for id, g in self.graphs.items() if g.seed == seed]:
                self.forget(id, "the pass was run again")
        if frozen != self.frozen:
            self.frozen, names = frozen, set(frozen)
            for name, p in self.module.named_parameters():
                p.requires_grad_(self.needed[name] and name not in names)
        self.release(release)
        if wire and wire not in _FLOATS:
            raise Invalid(f"param wire={wire!r} is none of {', '.join(_FLOATS)}")
        sent = getattr(torch, wire) if wire else None
        self.answer = {}  # its client has heard of it, or does not ask any more
        xs = {}
        for name, given in inputs.items():
            # What is lent until the answer may be memory of the link: the graph needs its own.
            x = given.detach().clone() if self.device == "cpu" else given.data
            x = x.to(self.type) if sent and x.is_floating_point() else x
            xs[name] = x.requires_grad_() if differentiable(x) and name in wanted else x
        own = self.own
        if own is None:
            own = self.own = {storage(t)[0] for t in (*self.parameters, *self.module.buffers())}
        counted: dict[int, int] = {}

        def count(x: Any) -> None:
            place, n = storage(x)
            if place not in own and place not in counted:
                counted[place] = n

        def pack(x: Any) -> Any:
            count(x)
            return x.detach(), x._version  # x itself may be an output: a cycle would keep the graph

        def unpack(packed: Any) -> Any:
            x, version = packed
            if x._version != version:  # torch does not look where there are hooks
                self.void = _MODIFIED
                raise ModelError(_MODIFIED)  # which torch makes a RuntimeError of
            return x

        self.mode(not eval)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        try:
            with torch.set_grad_enabled(grad), self.seeded(seed), hooks:
                begun = {name: Joint.apply(x) if x.requires_grad else x for name, x in xs.items()}
                given, named = self.arguments(begun)
                said = self.trainer.forward(*given, **named)
                outputs = dict(named_results(list(self.outputs), said))
        except Exception as err:
            raise told(err) from err
        travel = {n: _travels(y.detach(), sent) if torch.is_tensor(y) else y for n, y in outputs.items()}
        if not grad:
            return travel, outputs
        graph_of = {n: y for n, y in outputs.items() if torch.is_tensor(y)}
        for y in (*xs.values(), *graph_of.values()):
            count(y)
        graph = Graph(xs, graph_of, sum(counted.values()), call.session, retain, seed, sent, time.monotonic())
        if self.room and graph.bytes > self.room:
            raise Refused(
                f"the graph has {graph.bytes} bytes, and {self.room} are for all; give the server more --memory"
            )
        while self.graphs and (len(self.graphs) >= GRAPHS or (self.room and self.bytes + graph.bytes > self.room)):
            mine = (id for id, g in self.graphs.items() if g.session == call.session)
            self.forget(next(mine, next(iter(self.graphs))), "it was dropped for newer ones", "evicted")
        if not call.cancelled:
            self.graphs[call.id] = graph
            self.bytes += graph.bytes
            self.most = max(self.most, graph.bytes)
        return travel, outputs

    def backward(
        self, call: Call, gradients: dict[str, Any], lease: str, forward: str, unused: str, alone: bool, absent: bool,
        lists: str, order: str,
    ) -> dict[str, Any]:  # fmt: skip
        """NAME/backward, and the step after it if it has one. Asked again for that step, it has the same answer."""
        self.check(call, lease)
        take, step = None, self.heard(gradients, lists)[1]
        if step and (lease, step["n"]) == self.last:
            if not self.answer:
                raise Refused(f"the gradients of step {self.steps}, which stands, are gone")
            return self.answer
        if step:
            take = self.ready(lease, **step)
        graph = self.graphs.get(forward)
        if graph is None:
            self.counts["missed"] += 1
            why = self.reasons.get(forward, "the process that had it was started anew, or it never was")
            raise Refused(f"the graph of forward pass {forward!r} is gone: {why}; run the forward pass again")
        left = set(unused.split(","))
        ys, gs = [], []
        for name, g in gradients.items():
            y = graph.outputs.get(name)
            if name in left or y is None or not y.requires_grad or (absent and is_absent(g, y.shape)):
                continue
            if g.is_complex() and not y.is_complex():
                raise Invalid(f"gradient {name!r} is complex, the output real")
            if g.shape != y.shape:
                raise Invalid(f"gradient {name!r} is {list(g.shape)}, the output {list(y.shape)}")
            ys.append(y)
            gs.append(g.to(y.dtype, copy=True))  # a parameter may keep it, and g is lent
        if not graph.retain:
            self.forget(forward, "a backward pass has used it", "used")
        xs = [x for x in graph.inputs.values() if x.requires_grad]
        for x in xs:
            x.grad = None  # of a pass that failed
        try:
            if ys and alone:
                with _threads(False):
                    found = torch.autograd.grad(ys, xs, gs, retain_graph=graph.retain, allow_unused=True) if xs else ()
                for x, g in zip(xs, found):
                    x.grad = g
            elif ys:
                self.trainer.backward(ys, gs, graph.retain)
        except Exception as err:
            if self.void == _MODIFIED:
                raise ModelError(_MODIFIED) from err
            self.void = "a backward pass failed"
            raise told(err) from err
        self.passes += not alone
        if not take and call.cancelled and not alone:  # whoever does not hear of a step asks for it
            self.void = "a backward pass was cancelled"
        answer = dict.fromkeys(self.inputs, _NOTHING)  # of those that were left out, too
        answer.update({name: _travels(_gradient(x, absent), graph.wire) for name, x in graph.inputs.items()})
        for x in graph.inputs.values():
            x.grad = None
        if take:
            take(answer)
        return answer

    def release(self, forwards: Iterable[str]) -> None:
        for id in forwards:
            self.forget(id, "it was released")

    # Steps.

    def zero(self) -> None:
        """Drops the gradients."""
        self.void, self.passes, self.answer = "", 0, {}
        for p in self.parameters:
            p.grad = None

    def state(self, square: float = 0.0, finite: bool = True) -> Any:
        """The step that stands, the squared norm of the gradients, whether all are finite, and of how many passes."""
        return torch.tensor([self.steps, square, finite, self.passes], dtype=torch.float64)

    def step(
        self, call: Call, _: Any, lease: str, n: int, passes: int, optimizer: str, groups: str, scale: float,
        clip_value: float, norm: bool, discard: bool, rewind: Optional[int], order: str,
    ) -> Any:  # fmt: skip
        """NAME/step."""
        self.check(call, lease)
        if discard:
            self.zero()
            return self.state()
        if rewind is not None:
            self.rewind(rewind)
            return self.state()
        if norm:
            self.whole()
            grads = (p.grad for p in self.parameters if p.grad is not None)
            total = sum(map(squares, grads), torch.zeros((), dtype=torch.float64))
            return self.state(float(total), bool(torch.isfinite(total)))
        self.stepped(lease, n, _read(groups, 0), passes, optimizer, scale, clip_value)
        return self.state()

    def apply(self, call: Call, given: dict[str, Any], lease: str, order: str, **step: Any) -> Any:
        """NAME/apply: a step whose groups are an input, and that says what else went wrong."""
        self.check(call, lease)
        self.stepped(lease, groups=_read(given["groups"], self.lists), **step)
        return {"y": self.state(), "warning": octets_of(self.unsaved)}

    def heard(self, given: dict[str, Any], text: str) -> tuple[dict[str, Any], Optional[dict[str, Any]]]:
        """The lists of a call, and its step: a param, or an input, as they grow with the module."""
        octets = given.pop(LISTS, None)
        said = _read(text if octets is None else octets, self.lists)
        if not isinstance(said, dict) or not all(isinstance(v, {"step": dict}.get(n, list)) for n, v in said.items()):
            raise Invalid(f"{LISTS} is not an object of lists, needs, frozen and release, and an object, step, as JSON")
        step = said.pop("step", None)
        if step is not None:
            parsed = {k: p.parse(k, str(step.get(k, p.default))) for k, p in _STEP.items()}
            step = {**parsed, "groups": step.get("groups")}
        return said, step

    def stepped(self, lease: str, n: int, *step: Any, **more: Any) -> None:
        """Takes a step, unless it is taken already."""
        if (lease, n) != self.last:
            self.ready(lease, n, *step, **more)({})

    def whole(self) -> None:
        """Raises if the gradients are not to be used."""
        if self.void:
            raise Refused(
                f"{self.void}: the gradients are not whole; zero them, and run the passes since the last step again"
            )

    def ready(
        self, lease: str, n: int, groups: Any, passes: int, optimizer: str, scale: float, clip_value: float
    ) -> Callable[[dict[str, Any]], None]:
        """Sees whether a step can be taken, and returns what takes it, and keeps the answer of the pass before it."""
        self.whole()
        if n != self.steps + 1:
            raise Refused(f"step {n} does not follow step {self.steps}, which stands")
        if passes not in (-1, self.passes):
            raise Refused(
                f"the gradients are of {self.passes} backward passes, the client had {passes} confirmed; "
                "zero them, and run the passes since the last step again"
            )
        if not (abs(scale) <= NUMBER and clip_value >= 0):  # nor NaN
            raise Invalid(f"scale={scale}, clip_value={clip_value}: one is no number of float32, or negative")
        if clip_value and any(p.is_complex() for p in self.parameters):
            raise Invalid("complex gradients have no order: clip them by their norm")
        options = {"optimizer": optimizer, "groups": _groups(groups)}
        self.trainer.prepare(options)

        def take(answer: dict[str, Any]) -> None:
            try:
                with torch.no_grad():
                    for g in (p.grad for p in self.parameters if p.grad is not None):
                        if scale != 1.0:
                            g.mul_(scale)
                        if clip_value:
                            g.clamp_(-clip_value, clip_value)
                    self.trainer.step(options)
            except Exception as err:
                self.void = "a step failed half-way"
                raise told(err) from err
            self.zero()
            for id in list(self.graphs):
                self.forget(id, f"step {n} came after it", "expired")
            self.steps, self.last, self.unsaved, self.answer = n, (lease, n), "", answer
            if self.folder is not None and n % self.every == 0:
                self.attempt()

        return take

    # State and checkpoints.

    def tensors(self, what: str) -> dict[str, Any]:
        """The tensors of the module, or of its optimizer, by name."""
        if what == "model":
            return {n: t for n, t in self.module.state_dict(keep_vars=True).items() if torch.is_tensor(t)}
        if what != "optimizer":
            raise Invalid(f"param what={what!r} is neither model nor optimizer")
        state = self.trainer.state()["optimizer"] or {"state": {}}
        return {
            f"{i}.{k}": torch.as_tensor(v) for i, s in state["state"].items() for k, v in s.items() if v is not None
        }

    def read(self, call: Call, _: Any, lease: str, what: str, about: bool) -> dict[str, Any]:
        """NAME/state."""
        if not about:
            self.check(call, lease)
        found = self.tensors(what)
        own = dict(self.module.named_parameters())  # a tied one once
        said = json.dumps({"step": self.steps, "tensors": describe(found, own)})
        return {
            "y": torch.empty(0, dtype=torch.uint8) if about else pack_tensors(found.values()),
            "about": octets_of(said),
        }

    def load(self, call: Call, given: dict[str, Any], lease: str) -> Any:
        """NAME/load: whole, or not at all."""
        self.check(call, lease)
        have = self.tensors("model")
        want = describe(have, ())
        try:
            got = [list(d)[:3] for d in _read(given["about"], 2 * len(json.dumps(want)) + ABOUT_BYTES)]
        except TypeError:
            raise Invalid("about is not a list of names, types and shapes, as JSON") from None
        for a, b in zip(want, got):
            if a[:3] != b:
                raise Invalid(f"the module has {' '.join(map(str, a[:3]))}, given was {' '.join(map(str, b))}")
        if len(want) != len(got):
            raise Invalid(f"the module has {len(want)} tensors, given were {len(got)}")
        if self.graphs:
            raise Refused("graphs of forward passes are kept; run their backward passes, or release them, first")
        parts = unpack_tensors(given["y"], have)
        with torch.no_grad():
            for t, new in zip(have.values(), parts):
                t.copy_(new)
        self.saved = -1
        return self.state()

    def checkpoints(self) -> list[int]:
        assert self.folder is not None
        return sorted(int(p.stem[5:]) for p in self.folder.glob("step-*.pt") if p.stem[5:].isdigit())

    def attempt(self) -> None:
        """Writes a checkpoint, or says why there is none: without it the step stands, too."""
        try:
            self.save()
        except Exception as err:
            self.counts["failed"] += 1
            kept = ", ".join(map(str, self.checkpoints())) or "none"
            self.unsaved = f"step {self.steps} stands, but has no checkpoint: {err}; those that are kept: {kept}"
            print(self.unsaved)

    def save(self) -> None:
        """Writes a checkpoint, whole or not at all, and drops older ones."""
        assert self.folder is not None
        if self.saved == self.steps:
            return
        state = {
            "step": self.steps, "last": self.last, "answer": self.answer, "module": self.module.state_dict(),
            "trainer": self.trainer.state(), "rng": torch.get_rng_state(),
        }  # fmt: skip
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".new", delete=False) as f:
            try:
                whole = _Whole(f)
                torch.save(state, whole)
                if whole.failed is not None:
                    raise whole.failed
                f.flush()
                os.fsync(f.fileno())
                os.replace(f.name, self.folder / f"step-{self.steps}.pt")
            except BaseException:
                os.unlink(f.name)
                raise
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.saved = self.steps
        for old in self.checkpoints()[:-CHECKPOINTS]:
            (self.folder / f"step-{old}.pt").unlink()

    def rewind(self, n: int) -> None:
        """Goes back to a checkpoint, or forward to it after a restart."""
        if self.folder is None:
            raise Refused("there are no checkpoints; the server makes them with --python NAME=…,checkpoint=FOLDER")
        stands = self.checkpoints()
        if n not in stands:
            raise Refused(f"there is no checkpoint {n}; there are {', '.join(map(str, stands)) or 'none'}")
        path = self.folder / f"step-{n}.pt"
        before = self.trainer.state()
        try:
            state = torch.load(path, map_location=self.device, weights_only=_TORCH2)
            self.trainer.load(state["trainer"])
            if describe(state["module"], ()) != describe(self.module.state_dict(), ()):
                raise ValueError("its tensors are not those of the module")
        except Exception as err:
            self.trainer.load(before)
            raise ValueError(f"checkpoint {path} cannot be loaded: {err}; without it, the one before counts") from err
        self.drop(f"the model went back to step {n}")
        self.module.load_state_dict(state["module"])
        self.own = None
        torch.set_rng_state(state["rng"].cpu())
        self.steps, self.last, self.saved, self.answer = n, tuple(state["last"]), n, state.get("answer", {})
        for later in [s for s in stands if s > n]:
            (self.folder / f"step-{later}.pt").unlink()

    # What the worker tells the server.

    def kept(self) -> dict[str, Any]:
        """The json of the message kept (docs/link.md)."""
        gauges = {
            "graphs": len(self.graphs), "bytes": self.bytes, "step": self.steps, "lease": int(self.held()),
            **self.counts,
        }  # fmt: skip
        answer = sum(g.numel() * g.element_size() for g in self.answer.values())
        return {"kept": self.bytes + answer, "most": self.most, "gauges": gauges}

    def companions(self, base: Prepared) -> list[Prepared]:
        """The models beside the module's own."""
        self.inputs, self.outputs, self.arguments = base.inputs, base.outputs, base.arguments
        like = Like("torch", base.like.device)
        lease = {"lease": Param(str, "", "token of who trains")}
        order = {
            "order": Param(str, "", "SERIES.N, of calls that are begun together: N runs after N-1, the first is 0")
        }

        def made(name: str, work: Any, inputs: dict[str, Port], outputs: dict[str, Port], **params: Param) -> Prepared:
            def compute(call: Call, **given: Any) -> Any:
                return work(call, given, **call.params)

            return dataclasses.replace(
                base, name=name, compute=compute, inputs=inputs, outputs=outputs, params=params, rows=0, block_rows=0,
                by_name={*inputs}, wants_call=True, module=False, stateful=False, idempotent=False,
                keeps=name in ("forward", "train"), ordered="order" in params,
                like=like, companions=[], about={}, teardown=lambda: None,
            )  # fmt: skip

        whole = {n: dataclasses.replace(p, whole=False) for n, p in base.inputs.items()}
        state = {"y": Port(("float64",), (4,))}
        octets = Port(("uint8",), (FREE,))
        long = dataclasses.replace(octets, optional=True)
        passes: dict[str, Param] = {
            "seed": Param(int, None, "of dropout and other random numbers"),
            "retain": Param(bool, False, "keep the graph after a backward pass"),
            "eval": Param(bool, False, "in eval mode"),
            "wire": Param(str, "", "type that outputs and gradients are sent as; inputs become the module's"),
        }
        lists = Param(str, "{}", "needs, frozen and release, and a step, as JSON; an input if it is long")
        return [
            made("forward", self.listed, {**whole, LISTS: long}, {**base.outputs, SAID: octets},
                 **lease, **order, **passes, lists=lists, grad=Param(bool, True, "keep a graph")),
            made("train", self.train, whole, base.outputs, **lease, **order, **passes,
                 needs=Param(str, "*", "inputs that need a gradient, joined by commas"),
                 frozen=Param(str, "", "parameters that get no gradient, joined by commas"),
                 release=Param(str, "", "forward passes whose graphs are not needed")),
            made("backward", self.backward, {**{n: Port() for n in base.outputs}, LISTS: long},
                 {n: Port() for n in base.inputs}, **lease, **order, lists=lists,
                 forward=Param(str, "", "id of the call of the forward pass"),
                 alone=Param(bool, False, "the gradients of the inputs alone, and none of parameters"),
                 absent=Param(bool, False, "an empty gradient is none, of outputs and of inputs"),
                 unused=Param(str, "", "outputs without a gradient, joined by commas")),
            made("apply", self.apply, {"groups": octets}, {**state, "warning": octets}, **lease, **order, **_STEP),
            made("step", self.step, {}, state, **lease, **order, **_STEP,
                 groups=Param(str, "[{}]", "options of each group of parameters, as JSON"),
                 norm=Param(bool, False, "only answer the squared norm of the gradients"),
                 discard=Param(bool, False, "only zero the gradients"),
                 rewind=Param(int, None, "only go to this checkpoint")),
            made("release", self.released, {}, state, **lease,
                 forwards=Param(str, "", "ids of forward passes, joined by commas")),
            made("lease", self.take, {}, state,
                 token=Param(str, "", "a text that only this client knows"),
                 end=Param(bool, False, "give the lease up"),
                 wait=Param(bool, False, "have nobody else take it before, if asked again within a second")),
            made("state", self.read, {}, {"y": octets, "about": octets}, **lease,
                 what=Param(str, "model", "model or optimizer"),
                 about=Param(bool, False, "only names, types and shapes")),
            made("load", self.load, {"y": octets, "about": octets}, state, **lease),
        ]  # fmt: skip

    def released(self, call: Call, _: Any, lease: str, forwards: str) -> Any:
        """NAME/release."""
        self.check(call, lease)
        self.release(forwards.split(","))
        return self.state()


def _groups(groups: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer's parameters, as JSON says them."""
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise Invalid("param groups is not a list of objects, as JSON")
    for name, value in ((name, value) for g in groups for name, value in g.items()):
        parts = value if isinstance(value, list) else [value]
        if not all(part is None or (isinstance(part, str) if name == "params" else _is_number(part)) for part in parts):
            raise Invalid(f"param groups: {name} is no number, nor a list of them")
    return groups


def told(err: Exception) -> ModelError:
    """What the trainer, who may read the weights, reads of an exception of the module."""
    return err if isinstance(err, ModelError) else ModelError(f"{type(err).__name__}: {err}")


class Joint(torch.autograd.Function):  # type: ignore[misc]
    """A tensor as an operation returns it, neither a leaf nor a view: what takes it may begin in place."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.data

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class _Whole:
    """A file for torch.save. The writer of torch 1 ends the process where a write raises: the error waits here."""

    def __init__(self, file: Any) -> None:
        self.file, self.flush = file, lambda: None
        self.failed: Optional[Exception] = None

    def write(self, part: Any) -> int:
        try:
            self.failed or self.file.write(part)
        except Exception as err:
            self.failed = err
        return memoryview(part).nbytes


def differentiable(x: Any) -> bool:
    return bool(x.is_floating_point() or x.is_complex())


def squares(g: Any) -> Any:
    """The squared norm of a gradient."""
    g = torch.view_as_real(g.detach().resolve_conj()) if g.is_complex() else g.detach()
    return g.double().square().sum()


def is_absent(g: Any, shape: Any) -> bool:
    """Whether what travelled for a gradient of a shape says that there is none."""
    return tuple(g.shape) == (0,) != tuple(shape)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and abs(x) <= NUMBER  # nor NaN


def _gradient(x: Any, absent: bool) -> Any:
    if not x.requires_grad or (absent and x.grad is None):
        return torch.empty(0, dtype=x.dtype)
    return torch.zeros_like(x) if x.grad is None else x.grad


def _travels(y: Any, wire: Optional[torch.dtype]) -> Any:
    return y.to(wire) if wire is not None and y.is_floating_point() else y


def describe(tensors: Mapping[str, Any], parameters: Container[str]) -> list[list[Any]]:
    """Name, data type, shape, and whether it is one of the parameters, of each tensor."""
    return [[n, str(t.dtype).partition(".")[2], list(t.shape), n in parameters] for n, t in tensors.items()]


def pack_tensors(tensors: Iterable[Any]) -> Any:
    """The bytes of tensors, one after another."""
    dense = (t.detach().cpu().resolve_conj().resolve_neg().contiguous() for t in map(having, tensors) if t.numel())
    parts = [t.reshape(-1).view(torch.uint8) for t in dense]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unpack_tensors(octets: Any, like: Mapping[str, Any]) -> list[Any]:
    """The tensors that pack_tensors made bytes of."""
    sizes = [t.numel() * t.element_size() for t in like.values()]
    if octets.numel() != sum(sizes):
        raise Invalid(f"the tensors have {sum(sizes)} bytes, given were {octets.numel()}")
    return [
        part.clone().view(t.dtype).reshape(t.shape) if part.numel() else torch.empty(t.shape, dtype=t.dtype)
        for part, t in zip(torch.split(octets.cpu(), sizes), like.values())
    ]


def octets_of(text: str) -> Any:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _read(said: Any, most: int) -> Any:
    """What a text, or a tensor, says as JSON; None if it is longer than most bytes, or says nothing."""
    try:
        if isinstance(said, str):
            return json.loads(said)
        return json.loads(bytes(said.tolist())) if said.numel() <= most else None
    except (ValueError, RecursionError):
        return None
