"""Cuts a torch module at two of its blocks.

The module's forward runs in bottom and in top, over twins of the modules on the way to the blocks: bottom ends it at
the first block of the trunk, and top calls no block but its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Callable

import torch

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)
_signature = functools.lru_cache(maxsize=256)(inspect.signature)


class _Reached(BaseException):
    """Ends the forward in bottom. What handles Exception does not see it."""


class _Absent(torch.Tensor):
    """A tensor of which top knows the shape, the data type and the device, but not the values."""

    meta: Any
    at: Any
    block = ""  # of the trunk, whose result it is
    indexed = False  # it was taken for several results

    device = property(lambda self: self.at)

    @staticmethod
    def like(x: Any, at: Any, block: str = "") -> _Absent:
        with torch._C.DisableTorchFunction():
            meta = torch.empty_like(x, device="meta")
            made: _Absent = torch.Tensor._make_subclass(_Absent, meta)
        made.meta, made.at, made.block = meta, at, block
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        absent = [x for x in _leaves((args, kwargs)) if isinstance(x, _Absent)]
        block = next((x.block for x in absent if x.block), "")
        if block and name == "__getitem__" and args[1] == 0:
            args[0].indexed = True
            return args[0]
        if block and name not in ("__get__", "size", "dim", "numel"):
            raise _uncut(f"its forward uses the result of {block} in {name}, not only in a call of the next block")
        changes = name.startswith("__i") or name == "__setitem__" or (name[-1] == "_" and name[-2] != "_")
        if (changes and not isinstance(args[0], _Absent)) or kwargs.get("out") is not None:
            raise _wants(name)
        try:
            with torch._C.DisableTorchFunction():
                said = func(*_mapped(_unreal, args), **_mapped(_unreal, kwargs))
        except Exception as err:  # it asks for values, or meta tensors do not have it
            raise _wants(name) from err
        return _mapped(lambda x: _Absent.like(x, absent[0].at) if isinstance(x, torch.Tensor) else x, said)


def _uncut(why: str) -> RuntimeError:
    return RuntimeError("the model cannot be cut here: " + why)


def _wants(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} needs values from before the cut: call top(h, x), where x is what bottom had; "
        "if that is refused too, the model cannot be cut here"
    )


def _unreal(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("meta")
    if isinstance(x, _Absent):
        return x.meta
    return torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x


def _mapped(f: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _mapped(f, v) for k, v in x.items()}
    return type(x)(_mapped(f, v) for v in x) if type(x) in (tuple, list) else f(x)


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (dict, tuple, list)):
        for v in x.values() if isinstance(x, dict) else x:
            yield from _leaves(v)
    else:
        yield x


def _twin(m: Any, **changed: Any) -> Any:
    made = object.__new__(type(m))
    vars(made).update({**vars(m), "_compiled_call_impl": None, **changed})
    return made


class _Cut:
    """A module, where its blocks are, and which are the first of the trunk and of top."""

    def __init__(self, model: Any, path: list[str], first: int, second: int, also: tuple[str, ...]):
        self.path, self.first, self.second, self.also = path, first, second, also
        self.modules = [model]  # on the way to the blocks
        for name in path:
            self.modules.append(self.modules[-1]._modules[name])
        self.names = list(self.modules[-1]._modules)
        self.seen: Any = None  # bottom's last inputs, without values, and the shape of its result

    def name(self, block: int) -> str:
        return ".".join([*self.path, self.names[block]])

    def run(self, training: bool, call: Callable[..., Any], inputs: Any, named: Any) -> Any:
        """Runs the module's forward. Instead of a block it calls call(number, block, args, kwargs)."""
        blocks = {}
        for i, (name, b) in enumerate(self.modules[-1]._modules.items()):
            hooks = {k: type(v)() for k, v in vars(b).items() if v and k.endswith("_hooks")}  # they run where b does
            blocks[name] = _twin(b, **hooks, forward=lambda *a, _i=i, _b=b, **k: call(_i, _b, a, k))
        made = _twin(self.modules[-1], _modules=blocks, training=training)
        for m, name in zip(self.modules[-2::-1], self.path[::-1]):
            made = _twin(m, _modules={**m._modules, name: made}, training=training)
        return made(*inputs, **named)

    def taken(self, i: int, block: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """The tensors that a block of the trunk is called with: its own, and those of also."""
        parameters, x = _signature(type(block).forward).parameters, args[0] if args else None
        given = {**dict(zip([*list(parameters)[2:], *map(str, range(len(args)))], args[1:])), **kwargs}
        if not isinstance(x, torch.Tensor):
            raise _uncut(f"{self.name(i)} is called with a {type(x).__name__} first, not with a tensor")
        for n, v in given.items():
            usual = parameters[n].default if n in parameters else None
            usual = None if usual is inspect.Parameter.empty else usual
            if n not in self.also and v is not usual and not (isinstance(v, (int, float, str)) and v == usual):
                tensors = any(isinstance(y, torch.Tensor) for y in _leaves(v))
                hint = f"; split(..., also=[{n!r}]) hands it on" if tensors else ""
                said = v if isinstance(v, (int, float, str, type(None))) else f"a {type(v).__name__}"
                raise _uncut(f"{self.name(i)} is called with {n}={said}, which the trunk does not know{hint}")
        return x, *(given.get(n) for n in self.also)


class _Part(torch.nn.Module):
    """The modules of one part, under their names in the whole."""

    def __init__(self, cut: _Cut, part: int):
        super().__init__()
        self._cut, at, bounds = cut, self, (0, cut.first, cut.second, len(cut.names))
        for m, below in zip(cut.modules, [*cut.path, ""]):
            at.training, names = cut.modules[0].training, list(m._modules)
            if not below:
                names = names[bounds[part] : bounds[part + 1]]
            else:  # what was registered before the blocks is bottom's, and what was after them top's
                k = names.index(below)
                names = (names[:k], [], names[k + 1 :])[part]
            at._modules.update({n: m._modules[n] for n in names})
            if part == 0:  # and so are tensors that are not in the blocks
                at._parameters, at._buffers = m._parameters, m._buffers
                at._non_persistent_buffers_set = m._non_persistent_buffers_set
            if below:
                at._modules[below] = at = torch.nn.Module()


class _Bottom(_Part):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        cut, found = self._cut, list[Any]()

        def call(i: int, block: Any, args: Any, kwargs: Any) -> Any:
            if i < cut.first:
                return block(*args, **kwargs)
            found.extend(cut.taken(i, block, args, kwargs))
            raise _Reached

        with contextlib.suppress(_Reached):
            cut.run(self.training, call, inputs, named)
        if not found:
            raise _uncut(f"the model's forward does not call {cut.name(cut.first)}")
        bare = _mapped(lambda x: _Absent.like(x, x.device) if isinstance(x, torch.Tensor) else x, (inputs, named))
        cut.seen = (*bare, found[0].shape)
        return tuple(found) if cut.also else found[0]


class _Chain(_Part):
    """Blocks of which each is called with the result of the one before."""

    def __init__(self, cut: _Cut, part: int):
        super().__init__(cut, part)
        self._path, self._also, self._first = ".".join(cut.path), cut.also, isinstance(cut.modules[-1], _CONTAINERS[0])
        self.__tensorferry__ = {"inputs": ["x", *cut.also]}
        del self._cut  # a server needs no more than the trunk

    def forward(self, x: Any, *also: Any) -> Any:
        if len(also) != len(self._also):
            raise TypeError(f"the trunk takes {', '.join(('x', *self._also))}; {len(also) + 1} tensors were given")
        for name, block in self.get_submodule(self._path)._modules.items():
            more = dict(zip(self._also, also))
            for p in list(_signature(type(block).forward).parameters.values())[2:]:
                if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                    more.setdefault(p.name, None)  # as taken has it
            x = block(x, **more)
            if self._first and isinstance(x, (tuple, list)):
                if any(y is not None for y in x[1:]):
                    raise _uncut(f"block {name} returns more than one tensor")
                x = x[0]
        return x


class _Top(_Part):
    def __init__(self, cut: _Cut, bottom: Any):
        super().__init__(cut, 2)
        self._bottom = (bottom,)  # a tuple: it is not a part

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parameters but those that bottom has, too."""
        held = {id(p) for p in self._bottom[0].parameters()}
        return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if id(p) not in held)

    def forward(self, h: Any, *inputs: Any, **named: Any) -> Any:
        cut = self._cut
        if not inputs and not named:
            inputs, named = self._without_values(h)
        last: Any = None  # what the last block that was left out has "returned"
        also: Any = ()
        turn = 0

        def call(i: int, block: Any, args: Any, kwargs: Any) -> Any:
            nonlocal last, also, turn
            if i != turn:
                raise _uncut(f"the model's forward calls {cut.name(i)} out of order")
            turn += 1
            if i > cut.second:
                return block(*args, **kwargs)
            x = args[0] if args else None
            if i > cut.first and x is not last:
                raise _uncut(f"{cut.name(i)} is not called with the result of {cut.name(i - 1)}")
            indexed = last is not None and last.indexed
            if i < cut.first:
                last = _Absent.like(h, h.device)
                return last
            if i < cut.second:
                _, *more = cut.taken(i, block, args, kwargs)
                if i > cut.first and any(a is not b for a, b in zip(also, more)):
                    raise _uncut(f"{cut.name(i)} is not called with the same {', '.join(cut.also)} as the one before")
                last, also = _Absent.like(h, h.device, cut.name(i)), more
                last.indexed = indexed
                return last
            stem.close()
            if any(isinstance(y, _Absent) for y in _leaves((args[1:], kwargs))):
                raise _wants(cut.name(i))
            result = block(h, *args[1:], **kwargs)
            if indexed and isinstance(result, torch.Tensor):
                raise _uncut(f"the model's forward takes a part of the result of {cut.name(i - 1)}")
            return result

        with contextlib.ExitStack() as stem:  # what comes before the blocks draws random numbers in bottom only
            stem.enter_context(torch.random.fork_rng([h.device] if h.is_cuda else []))
            result = cut.run(self.training, call, inputs, named)
        if turn < len(cut.names):
            raise _uncut(f"the model's forward does not call {cut.name(turn)}")
        absent = [x for x in _leaves(result) if isinstance(x, _Absent)]
        if any(x.block for x in absent):
            raise _uncut(f"the model returns the result of {next(x.block for x in absent if x.block)}")
        if absent:
            raise _wants("what the model returns")
        return result

    def _without_values(self, h: Any) -> tuple[Any, Any]:
        if self._cut.seen is None:
            raise _wants("top before bottom")
        inputs, named, shape = self._cut.seen
        if h.shape != shape:
            raise _wants(f"a tensor of {list(h.shape)}, where bottom returned {list(shape)} last,")
        for x in _leaves((inputs, named)):
            if not isinstance(x, (_Absent, bool, str, type(None))):
                raise _wants(f"a model that takes a {type(x).__name__}")
        return inputs, named


def _place(model: Any, name: str) -> tuple[list[str], int]:
    """The path of the list that has a block, and the block's number."""
    at, path = model, name.split(".")
    for depth, part in enumerate(path):
        if part not in at._modules:
            lists = [
                (n + "." if n else n, [*m._modules]) for n, m in model.named_modules() if isinstance(m, _CONTAINERS)
            ]
            has = ", ".join(f"{n}{b[0]} to {n}{b[-1]}" for n, b in lists[:3] if b)
            raise ValueError(f"the model has no block {name!r}; it has {has or 'no list of blocks'}")
        if depth == len(path) - 1 and not isinstance(at, _CONTAINERS):
            raise TypeError(f"{name!r} is in a {type(at).__name__}, not in a ModuleList or Sequential")
        if "forward" in vars(at):
            raise TypeError(f"the forward of a {type(at).__name__} was replaced: split the model before that")
        before, at = at, at._modules[part]
    return path[:-1], list(before._modules).index(path[-1])


def split(model: Any, first: str, second: str, *, also: Iterable[str] = ()) -> tuple[Any, Any, Any]:
    """Cut a module at two of its blocks: bottom, trunk and top, which begin with nothing, first and second.

    The blocks are in one ModuleList or Sequential. top(trunk(bottom(x))) is model(x), bit for bit, and so are the
    gradients. The parts have the model's own parameters, by their names there. Where top needs values of x, such as a
    mask, and where bottom has had other inputs since, call top(h, x). also names tensors beside the first that all
    blocks of the trunk take: bottom returns them, too, and trunk takes them. What cannot be cut is a RuntimeError of
    bottom or top.
    """
    (path, a), (other, b) = _place(model, first), _place(model, second)
    if path != other:
        raise ValueError(f"{first!r} and {second!r} are not in one list of blocks")
    if b <= a:
        raise ValueError(f"{second!r} does not come after {first!r}")
    cut = _Cut(model, path, a, b, tuple(also))
    trunk = _Chain(cut, 1)
    if not path and type(model).forward is torch.nn.Sequential.forward:
        bottom: Any = _Chain(cut, 0)
        top: Any = _Chain(cut, 2)
    else:
        bottom = _Bottom(cut, 0)
        top = _Top(cut, bottom)
    held = {id(p): n for n, p in trunk.named_parameters()}
    for n, p in (*bottom.named_parameters(), *top.named_parameters()):
        if id(p) in held:
            raise ValueError(f"{n!r} and {held[id(p)]!r} are one weight: a cut between them parts it")
    return bottom, trunk, top
