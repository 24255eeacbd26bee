"""What a Python model says of itself, and how a function, a class or a torch module becomes one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Container, Mapping, Sequence
from typing import Any, Callable, Optional, Union

from ._tensor import Like, default_like

ANY_AXES = -2  # as the first entry of a shape: any number of leading axes
FREE = -1  # a dimension of any size

# Values of rows that count from the end of the shape.
ALL_AXES = -1
ALL_BUT_LAST = -2

KINDS: dict[str, Any] = {kind.__name__: kind for kind in (str, int, float, bool)}
_ROWS = {"all": ALL_AXES, "all_but_last": ALL_BUT_LAST}
COROUTINES, MOST_CONCURRENCY = 16, 256  # blocks at a time: of an `async def` model that does not say; of any


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of a model's calls. kind is str, int, float or bool; a call has it as text.

    Of a model that is not Python's, kind may be another word, and default a text.
    """

    kind: Any = str
    default: Any = None
    meaning: str = ""

    def parse(self, name: str, text: Optional[str]) -> Any:
        """The value of a call's text, or the default where it has none."""
        if text is None:
            return self.default
        try:
            if self.kind is bool:
                return {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}[text.lower()]
            return self.kind(text)
        except (ValueError, KeyError):
            raise ModelError(f"param {name}={text!r} is not a {self.kind.__name__}") from None


@dataclasses.dataclass(frozen=True)
class Port:
    """One input or output: its data types (none: any), its shape, whether it is needed whole, and whether at all."""

    dtypes: tuple[str, ...] = ()
    shape: tuple[int, ...] = (ANY_AXES,)
    whole: bool = False
    optional: bool = False


class ModelError(ValueError):
    """An error of a model whose text the caller may read. That of any other goes to the server's log.

    An exception of another class says the same with an attribute `public = True`.
    """

    public = True
    code = 2  # of gRPC: UNKNOWN; here also 3 and 9


class Call:
    """The call that a block belongs to: handed to a function that has a parameter `call`."""

    def __init__(self, id: str, params: dict[str, Any], inputs: list[dict[str, Any]], worker: Any) -> None:
        self.id = id
        self.session = 0  # whose call it is, where the model trains
        self.params = params
        self.inputs = inputs  # port, name, metadata and shape of each whole input
        self.state: dict[str, Any] = {}  # lives as long as the sequence, or as the call where the model is stateful
        self.max_rows = 0  # of the sequence; 0 for a call of its own
        self.row = 0  # the first row of the block, in the sequence or the call
        self.rows = 0  # how many it has
        self._worker = worker
        self._block: Any = None  # that is computed
        self._bytes = self._look = 0  # of state, and when to count them again

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the result any more: a long computation looks now and then, and returns anything."""
        return bool(self._worker.cancelled(self._block))

    def empty(self, shape: Sequence[int], dtype: str = "float32") -> Any:
        """An array of the model's kind in shared memory. As a result it is not copied."""
        return self._worker.empty(self._block, tuple(shape), dtype)


class Model:
    """A model with set-up and tear-down. Attributes say what `tensorferry.model` does; what is None is the default."""

    inputs: Optional[Mapping[str, Any]] = None
    outputs: Optional[Mapping[str, Any]] = None
    rows: Union[int, str, None] = None
    block_rows: Optional[int] = None
    params: Optional[Mapping[str, Param]] = None
    device: Optional[str] = None
    stateful: Optional[bool] = None
    idempotent: Optional[bool] = None
    array: Optional[str] = None
    train: Optional[bool] = None
    concurrency: Optional[int] = None
    version: Optional[str] = None
    about: Optional[Mapping[str, str]] = None

    def setup(self) -> None:
        """Runs once in the worker, before the first call."""

    def teardown(self) -> None:
        """Runs once, when the worker ends."""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has neither compute nor __call__")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)


DECLARED = (
    "inputs", "outputs", "rows", "block_rows", "params", "device", "stateful", "idempotent", "array", "train",
    "concurrency", "version", "about",
)  # fmt: skip


def model(target: Any = None, **declarations: Any) -> Any:
    """Decorates a function, class or factory with what the model is. Unknown names are an error."""
    check(declarations)

    def decorate(f: Any) -> Any:
        f.__tensorferry__ = declarations
        return f

    return decorate if target is None else decorate(target)


def check(declarations: Mapping[str, Any]) -> None:
    unknown = sorted(set(declarations) - set(DECLARED))
    if unknown:
        raise TypeError(
            f"tensorferry: a model does not declare {', '.join(unknown)}; it may declare {', '.join(DECLARED)}"
        )


@dataclasses.dataclass
class Prepared:
    """A model ready to compute: what it says of itself, and the function of a block."""

    compute: Callable[..., Any]
    inputs: dict[str, Port]
    outputs: dict[str, Port]
    rows: int
    block_rows: int
    params: dict[str, Param]
    device: str
    stateful: bool
    idempotent: bool  # a call that is repeated has the same effect
    like: Like  # what inputs are
    version: str
    about: dict[str, str]
    teardown: Callable[[], None]
    by_name: set[str]  # inputs that are passed so, the others by position
    wants_call: bool
    module: bool  # of torch
    name: str = ""  # of a companion
    keeps: bool = False  # calls leave something that takes memory
    ordered: bool = False  # calls may say in which order they run
    concurrency: int = 1  # blocks at a time
    threads: int = 1  # that compute them
    companions: list[Prepared] = dataclasses.field(default_factory=list)
    training: Any = None  # what they share

    def mode(self) -> Any:
        """The mode that the model computes in: torch keeps no graph."""
        if self.like.kind != "torch":
            return contextlib.nullcontext()
        import torch

        return torch.no_grad()  # no graph can have what is made in inference mode and kept, such as a mask

    def arguments(self, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What compute is called with for inputs by port."""
        named = {n: x for n, x in given.items() if n in self.by_name}
        return [x for n, x in given.items() if n not in named], named

    def ready(self) -> dict[str, Any]:
        """The json of the message ready (docs/link.md)."""

        def ports(all: Mapping[str, Port]) -> list[dict[str, Any]]:
            return [{"name": n, **dataclasses.asdict(p)} for n, p in all.items()]

        def text(p: Param) -> str:
            return "" if p.default is None else str(p.default).lower() if p.kind is bool else str(p.default)

        more = {"companions": [m.ready() for m in self.companions]} if self.companions else {}
        return {
            "name": self.name,
            "keeps": self.keeps,
            "ordered": self.ordered,
            **more,
            "version": self.version,
            "device": self.device,
            "inputs": ports(self.inputs),
            "outputs": ports(self.outputs),
            "rows": self.rows,
            "block_rows": self.block_rows,
            "about": self.about,
            "stateful": self.stateful,
            "concurrency": self.concurrency,
            "idempotent": self.idempotent,
            "params": [
                {"name": n, "kind": p.kind.__name__, "default": text(p), "meaning": p.meaning}
                for n, p in self.params.items()
            ],
        }


def find(target: str) -> Any:
    """The object that module:name says."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"tensorferry: {target!r} names no model; write module:function")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def prepare(
    target: Any, declarations: Optional[Mapping[str, Any]] = None, options: Optional[Mapping[str, Any]] = None
) -> Prepared:
    """Makes a model of a function, a Model, a torch module, a class of these, or a factory of one.

    A class, or a function that can be called without arguments, is a factory: it is called once. Of several
    declarations of one thing the first counts: those given here, those of what the factory returned, those of the
    factory. options are those of one that trains, and blocks, of a module that is served in part.
    """
    layers: list[Mapping[str, Any]] = [dict(declarations or {})]
    check(layers[0])
    made = target
    while inspect.isclass(made) or _factory(made):
        layers.insert(1, getattr(made, "__tensorferry__", {}))
        made = made()
    if options and options.get("blocks"):
        made = _middle(made, options["blocks"], layers)
    layers.insert(1, _said(made))
    said: dict[str, Any] = {}
    for layer in reversed(layers):
        said.update({k: v for k, v in layer.items() if v is not None})
    if not callable(made):
        raise TypeError(f"tensorferry: {made!r} is no model; it cannot be called")
    return _prepared(made, said, options or {})


def _said(made: Any) -> Mapping[str, Any]:
    if isinstance(made, Model):
        own = dict(getattr(made, "__tensorferry__", {}))
        own.update({k: v for k in DECLARED if (v := getattr(made, k, None)) is not None})
        return own
    return getattr(made, "__tensorferry__", {}) or {}


def _factory(f: Any) -> bool:
    if not inspect.isroutine(f):
        return False
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # of a function in C nobody knows
        return False
    return all(p.default is not p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _middle(made: Any, blocks: str, layers: Sequence[Mapping[str, Any]]) -> Any:
    """Some blocks of a module, which take what declared inputs name beside the first."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(made, torch.nn.Module):
        raise TypeError(f"blocks={blocks} are those of a torch.nn.Module, not of a {type(made).__name__}")
    from ._split import split

    first, _, end = blocks.partition(":")
    inputs: list[str] = next((list(layer["inputs"]) for layer in layers if layer.get("inputs")), [])
    trunk = split(made, first, end, also=inputs[1:])[1]
    del trunk.__tensorferry__  # the declarations say more
    return trunk


def _prepared(made: Any, said: dict[str, Any], training: Mapping[str, Any]) -> Prepared:
    torch = sys.modules.get("torch")
    training_module: Any = sys.modules.get("tensorferry._train")
    trainer: Any = None
    if training_module is not None and isinstance(made, training_module.Trainer):
        trainer, made = made, made.module
    module = torch is not None and isinstance(made, torch.nn.Module)
    about = {k: str(v) for k, v in dict(said.get("about") or {}).items()}
    array, device = said.get("array"), said.get("device")
    teardown: Callable[[], None] = lambda: None  # noqa: E731
    compute = made
    if module:
        array = "torch"
        own = trainer is not None and type(trainer).forward is not training_module.Trainer.forward
        # What torch.compile makes takes anything, and passes it on.
        compute = trainer.forward if own else getattr(made, "_orig_mod", made).forward
    if array == "torch":
        torch = importlib.import_module("torch")
        if device is None:
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        elif device == "cuda":
            device = "cuda:0"
    if isinstance(made, Model):
        made.device = device or "cpu"
        made.setup()
        teardown = made.teardown
    trains = trainer is not None or bool(said.get("train"))
    if module:
        made = made.eval().to(device) if trains else _own(made, device)
    count = _parameters(made)
    if count:
        about.setdefault("parameters", str(count))
    like = Like("torch", None if device == "cpu" else device) if array == "torch" else default_like(array)
    params = dict(said.get("params") or {})
    own_code = made.compute if isinstance(made, Model) and type(made).__call__ is Model.__call__ else compute
    names, usual, wants_call, known = _signature(own_code, params)
    coroutine = any(map(inspect.iscoroutinefunction, (own_code, getattr(own_code, "__call__", None))))  # noqa: B004
    one = "trains" if trains else "is stateful" if said.get("stateful") else ""
    concurrency = said.get("concurrency", COROUTINES if coroutine and not one else 1)
    if not isinstance(concurrency, int) or not 1 <= concurrency <= MOST_CONCURRENCY:
        raise ValueError(f"tensorferry: concurrency={concurrency!r}; it is 1 to {MOST_CONCURRENCY}")
    if one and concurrency > 1:
        raise ValueError(f"tensorferry: concurrency={concurrency}: a model that {one} computes one block at a time")
    needed = [n for n in names if n not in usual]
    if "x" not in names and len(needed) <= module:  # the only one that is needed, whatever its name
        names = ["x", *[n for n in names if n not in (needed or names)[:1]]]
    inputs = _ports(said["inputs"] if "inputs" in said else dict.fromkeys(names))
    if usual.issuperset(split := [n for n, p in inputs.items() if not p.whole]):
        usual.difference_update(split[:1])  # there is one that says how many rows a call has
    inputs = {n: dataclasses.replace(p, optional=p.optional or n in usual) for n, p in inputs.items()}
    outputs = _ports(said.get("outputs", {"y": None}))
    rows = said.get("rows", 0)
    if rows in _ROWS:
        rows = _ROWS[rows]
    for name, p in params.items():
        if not isinstance(p, Param):
            raise TypeError(f"tensorferry: param {name} is a {type(p).__name__}, not a tensorferry.Param")
    prepared = Prepared(
        compute=made if module else compute,
        inputs=inputs,
        outputs=outputs,
        rows=int(rows),
        block_rows=int(said.get("block_rows", 0)),
        params=params,
        device=device or "cpu",
        stateful=bool(said.get("stateful", False)),
        idempotent=bool(said.get("idempotent", False)),
        like=like,
        version=str(said.get("version", "")),
        about=about,
        teardown=teardown,
        by_name={n for n, p in inputs.items() if known is None or known.issuperset(inputs) or p.optional},
        wants_call=wants_call,
        module=module,
        concurrency=concurrency,
        threads=1 if coroutine else concurrency,
    )
    if trains:
        _train(prepared, made, trainer, training)
    return prepared


def _own(made: Any, device: Any) -> Any:
    """A tree of modules like the program's, over the same parameters and buffers, in eval mode on a device."""
    import torch

    place, memo = torch.device(device), {}  # memo is deepcopy's: what stands for an object, by its id
    modules, functions, left, seen = list[Any](), list[Any](), [made], set[int]()
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, torch.jit.ScriptModule):  # its submodules are in C++
            memo[id(x)] = twin = copy.deepcopy(x)
            for mine, theirs in zip((*twin.parameters(), *twin.buffers()), (*x.parameters(), *x.buffers())):
                mine.data = theirs.data.to(place)
        elif isinstance(x, torch.nn.Module):
            memo[id(x)] = object.__new__(type(x))
            modules.append(x)
            left.append(vars(x))
            for t in (*x._parameters.values(), *x._buffers.values()):
                if t is not None and id(t) not in memo:
                    there = t if t.device == place else t.detach().to(place)
                    same = there is t or not isinstance(t, torch.nn.Parameter)
                    memo[id(t)] = there if same else torch.nn.Parameter(there, t.requires_grad)
        elif isinstance(x, (list, tuple, set, dict)):
            left.extend(x.values() if isinstance(x, dict) else x)
        elif isinstance(x, types.FunctionType) and x.__closure__:
            functions.append(x)
    for f in functions:  # such as a lambda that uses the module that has it
        cells = []
        for cell in f.__closure__:
            held = None
            with contextlib.suppress(ValueError):  # it is empty
                held = cell.cell_contents
            cells.append(types.CellType(memo[id(held)]) if id(held) in memo else cell)
        memo[id(f)] = twin = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, tuple(cells))
        twin.__kwdefaults__ = f.__kwdefaults__
    for x in modules:
        for name, value in vars(x).items():
            if name != "_compiled_call_impl":  # which is of the program's module
                try:
                    vars(memo[id(x)])[name] = copy.deepcopy(value, memo)
                except Exception:  # a lock, say, or what autograd has made
                    vars(memo[id(x)])[name] = value
    for x in [m for m in reversed(modules) if hasattr(m, "dynamo_ctx")]:  # torch.compile has bound a forward
        memo[id(x)].__init__(memo[id(x._orig_mod)], x.dynamo_ctx)
    return memo[id(made)].eval()


def _train(prepared: Prepared, module: Any, trainer: Any, options: Mapping[str, Any]) -> None:
    """Adds what trains the module."""
    if not prepared.module:
        raise TypeError(f"tensorferry: {module!r} cannot train; it is not a torch.nn.Module")
    from ._train import Trainer, Training

    training = Training(trainer or Trainer(module), prepared.device, options)
    prepared.training, prepared.teardown = training, training.close
    prepared.compute = training.infer
    prepared.companions = training.companions(prepared)


def named_results(names: list[str], said: Any) -> list[tuple[str, Any]]:
    """What a function returned by the names of the outputs, in their order."""
    if isinstance(said, dict):
        if set(said) != set(names):
            raise ModelError(f"the model returned {sorted(map(str, said))}, its outputs are {names}")
        return [(n, said[n]) for n in names]
    several = tuple(said) if isinstance(said, (tuple, list)) and len(names) > 1 else (said,)
    if len(several) != len(names):
        raise ModelError(f"the model returned {len(several)} results, its outputs are {names}")
    if isinstance(several[0], tuple):
        raise ModelError(f"the model returned {len(several[0])} results; declare them: outputs=('a', 'b')")
    return list(zip(names, several))


def _parameters(made: Any) -> int:
    """The parameters of a torch module, or of those that a Model has."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    modules = (
        [made]
        if isinstance(made, torch.nn.Module)
        else [m for m in getattr(made, "__dict__", {}).values() if isinstance(m, torch.nn.Module)]
    )
    return sum(p.numel() for m in modules for p in m.parameters())


def _signature(f: Any, params: Container[str]) -> tuple[list[str], set[str], bool, Optional[set[str]]]:
    """The inputs that a function names, what has a default, whether it wants the call, and what may be passed by name.

    That is None for anything. A default other than None is that of a setting, not of an input.
    """
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):
        return [], set(), False, set()
    names: list[str] = []
    usual: set[str] = set()
    known: Optional[set[str]] = set()
    for name, p in parameters.items():
        if p.kind is p.VAR_KEYWORD:
            known = None
        elif p.kind is not p.VAR_POSITIONAL and name != "call":
            named = p.kind is not p.POSITIONAL_ONLY
            if p.default is p.empty or (p.default is None and named and name not in params):
                names.append(name)
            if p.default is not p.empty and named:
                usual.add(name)
            if named and known is not None:
                known.add(name)
    return names, usual, "call" in parameters, known


def _ports(said: Union[Mapping[str, Any], Sequence[str]]) -> dict[str, Port]:
    if not isinstance(said, Mapping):
        said = dict.fromkeys(said)
    return {str(name): _port(name, p) for name, p in said.items()}


def _port(name: str, said: Any) -> Port:
    """A port said as a Port, a data type, several of them, or (data type, shape); None is anything."""
    if said is None:
        return Port()
    if isinstance(said, Port):
        return said
    if isinstance(said, str):
        return Port((said,))
    if isinstance(said, (tuple, list)) and len(said) == 2 and not isinstance(said[1], str):
        types = () if said[0] is None else (said[0],) if isinstance(said[0], str) else tuple(said[0])
        shape = (ANY_AXES,) if said[1] is None else tuple(int(d) for d in said[1])
        return Port(types, shape)
    if isinstance(said, (tuple, list)) and all(isinstance(d, str) for d in said):
        return Port(tuple(said))
    raise TypeError(
        f"tensorferry: port {name} is {said!r}; write a data type, (data type, shape), a tensorferry.Port or None"
    )
