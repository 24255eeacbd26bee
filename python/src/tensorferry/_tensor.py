"""Tensors of numpy, of torch and of neither, as bytes in memory and back.

A Source reads a caller's tensor: where its bytes lie, or one copy of them into memory
of the link. view and empty make tensors over memory. Neither numpy nor torch is
imported before somebody uses it. Everything is for any thread; nothing here owns
memory of the link.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from typing import Any, Callable, NamedTuple, Optional, SupportsIndex, Union

NAMES = (
    "", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
)  # fmt: skip
WIDTHS = (0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 8, 16)
NUMBERS = {name: number for number, name in enumerate(NAMES) if number}
# The formats of memoryview and array.array; numpy has more.
_FORMATS = {
    "?": 1, "b": 2, "h": 3, "i": 4, "q": 5, "l": 5, "n": 5, "B": 6, "c": 6, "H": 7, "I": 8, "Q": 9, "L": 9, "N": 9,
    "e": 10, "f": 12, "d": 13, "Zf": 16, "Zd": 17, "F": 16, "D": 17,
}  # fmt: skip
_TO_FORMAT = dict(zip(range(1, 14), ("?", "b", "h", "i", "q", "B", "H", "I", "Q", "e", "", "f", "d")))
# numpy has no such types; without ml_dtypes an array has their bits.
_BITS = {11: "uint16", 14: "uint8", 15: "uint8"}

# The most bytes of a block of a tensor that cannot be copied at any offset.
_BLOCK_BYTES = 1 << 20
_MOST_HELD = 10_000  # objects that held looks at: milliseconds


class Like(NamedTuple):
    """What results shall be: "numpy", "torch" or "tensor", and torch's device, None for memory."""

    kind: str
    device: Any = None


class Tensor:
    """A tensor over any buffer, for who has no numpy, and for data types that numpy lacks.

    data is a memoryview of the bytes, dense and row-major. It shares the memory of
    what it was made of.
    """

    __slots__ = ("data", "dtype", "shape")

    data: memoryview
    dtype: str
    shape: tuple[int, ...]

    def __init__(self, data: Any, shape: Optional[Sequence[SupportsIndex]] = None, dtype: Optional[str] = None):
        if _is(data, "torch", "Tensor"):
            data = having(data).detach().numpy()
        elif _is(data, "numpy", "ndarray"):
            _having_numpy(data)
        elif isinstance(data, Tensor):
            dtype, shape, data = dtype or data.dtype, data.shape if shape is None else shape, data.data
        number = 0 if dtype is None else number_of(dtype)
        view = memoryview(data)
        if not view.c_contiguous:
            raise ValueError("a Tensor is over dense, row-major bytes; copy the array first")
        number = number or _FORMATS.get(view.format.lstrip("@<=" if sys.byteorder == "little" else "@="), 0)
        if not number:
            raise TypeError(f"no data type is known for the buffer format {view.format!r}; say dtype=")
        if shape is None:
            shape = view.shape or ()
            if view.itemsize != WIDTHS[number]:
                if view.nbytes % WIDTHS[number] or view.ndim != 1:
                    raise ValueError(f"{view.nbytes} bytes are not a vector of {NAMES[number]}; say shape=")
                shape = (view.nbytes // WIDTHS[number],)
        self.shape = shape_of(shape)
        self.dtype = NAMES[number]
        if view.nbytes != size_of(number, self.shape):
            raise ValueError(
                f"{self.dtype} of shape {self.shape} has {size_of(number, self.shape)} bytes, data has {view.nbytes}"
            )
        self.data = view.cast("B") if view.nbytes else memoryview(bytearray())

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def numpy(self) -> Any:
        """Return a numpy array over the same memory."""
        return view(Like("numpy"), NUMBERS[self.dtype], self.shape, self.data)

    def torch(self) -> Any:
        """Return a torch tensor over the same memory. TypeError if torch lacks the data type."""
        made = view(Like("torch"), NUMBERS[self.dtype], self.shape, self.data)
        if isinstance(made, Tensor):
            raise TypeError(f"this torch has no {self.dtype}")
        return made

    def tolist(self) -> Any:
        """Return the elements as lists of Python values."""
        form = _TO_FORMAT.get(NUMBERS[self.dtype])
        if not form:
            raise TypeError(f"Python has no values for {self.dtype}")
        flat: list[Any] = self.data.cast(form).tolist()  # type: ignore[call-overload]
        for n in reversed(self.shape[1:]):
            flat = [flat[i : i + n] for i in range(0, len(flat), n)] if n else [[]] * math.prod(self.shape[:-1])
        return flat if self.shape else flat[0]

    def __bytes__(self) -> bytes:
        return bytes(self.data)

    def __repr__(self) -> str:
        return f"tensorferry.Tensor(shape={self.shape}, dtype={self.dtype!r})"


class Stream:
    """An input that is made while it is sent: it may be larger than memory.

    items yields buffers or arrays, of any size, that together are the tensor's
    elements, row after row. Bytes are taken as they are; arrays must have the data
    type. The items are asked for by the thread that waits for the call. For a client of
    aio it may be an asynchronous iterable.
    """

    __slots__ = ("dtype", "items", "shape")

    def __init__(self, items: Union[Iterable[Any], AsyncIterable[Any]], shape: Sequence[SupportsIndex], dtype: str):
        self.items: Any = items
        self.shape = shape_of(shape)
        self.dtype = NAMES[number_of(dtype)]


class Source:
    """A caller's tensor. Its bytes lie at address, or it is 0 and write copies them."""

    __slots__ = ("address", "copy", "dtype", "items", "keep", "like", "nbytes", "shape")

    def __init__(self, dtype: int, shape: tuple[int, ...], like: Optional[Like], address: int, keep: Any):
        self.dtype, self.shape, self.like, self.address, self.keep = dtype, shape, like, address, keep
        self.nbytes = size_of(dtype, shape)
        self.copy: Optional[Callable[[int], None]] = None  # in place of memmove
        self.items: Optional[Iterable[Any]] = None  # of a Stream

    def write(self, address: int) -> None:
        """Copy the bytes to an address."""
        if self.copy is not None:
            self.copy(address)
        else:
            ctypes.memmove(address, self.address, self.nbytes)

    def blocks(self) -> Iterator[Optional[Source]]:
        """Yield the tensor's bytes in order, as sources with an address or of at most _BLOCK_BYTES.

        None stands for an item that has yet to come.
        """
        if self.items is not None:
            for item in self.items:
                if item is self.items:  # of aio
                    yield None
                    continue
                block = of(item)
                if block.dtype not in (self.dtype, NUMBERS["uint8"]) or block.items is not None:
                    raise TypeError(f"an item of a Stream of {NAMES[self.dtype]} is {NAMES[block.dtype]}")
                yield from block.blocks()
        elif self.address or self.nbytes <= _BLOCK_BYTES:
            yield self
        else:
            # Rows that fit a block go together; one that does not is cut in turn.
            row = self.nbytes // self.shape[0]
            step = max(_BLOCK_BYTES // row, 1)
            for i in range(0, self.shape[0], step):
                part = self.keep[i : i + step]
                yield from of(part if row <= _BLOCK_BYTES else part[0]).blocks()


def number_of(dtype: Any) -> int:
    """Return the number of a data type: its name, or that of numpy or torch."""
    name = (
        dtype
        if isinstance(dtype, str)
        else getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    )
    number = NUMBERS.get(name.rpartition(".")[2], 0)
    if not number:
        raise TypeError(f"{dtype!r} is not a data type; known: {', '.join(NAMES[1:])}")
    return number


def shape_of(shape: Sequence[SupportsIndex]) -> tuple[int, ...]:
    """Return a shape as a tuple of int."""
    whole = tuple(n.__index__() for n in shape)
    if any(n < 0 for n in whole):
        raise ValueError(f"the shape {whole} has a negative dimension")
    return whole


def size_of(dtype: int, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor."""
    return WIDTHS[dtype] * math.prod(shape)


def address_of(buffer: Any) -> int:
    """Return where the bytes of a contiguous buffer lie, also of a read-only one."""
    info = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(info), 0)
    try:
        return info.buf or 0
    finally:
        _release_buffer(ctypes.byref(info))


class _PyBuffer(ctypes.Structure):
    # Py_buffer of CPython. ctypes gives addresses of writable buffers only.
    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))


_NO_MEMORY = "its memory was freed, or it has none of its own: nothing of it can be sent or written"

# What reads the tensors of a type, by the type.
_readers: dict[type, Callable[[Any], Source]] = {}


def of(x: Any, name: str = "") -> Source:
    """Return the source that reads x. TypeError says what is not a tensor, or has no memory."""
    try:
        reader = _readers.get(type(x))
        if reader is None:
            reader = _readers[type(x)] = _reader(x)
        source = reader(x)
        if source.nbytes and not source.address and source.copy is None and source.items is None:
            raise TypeError(_NO_MEMORY)
        return source
    except TypeError as err:
        raise TypeError(f"{name}: {err}" if name else str(err)) from None


def _is(x: Any, module: str, name: str) -> bool:
    """Report whether x is of a class of a module, if that is there: another thread may be importing it just now."""
    return isinstance(x, getattr(sys.modules.get(module), name, ()))


def _reader(x: Any) -> Callable[[Any], Source]:
    if _is(x, "torch", "Tensor"):
        return _of_torch
    if _is(x, "numpy.ma", "MaskedArray"):
        raise TypeError("a masked array has no bytes for what is masked; fill it first")
    if _is(x, "numpy", "ndarray"):
        return _of_numpy
    if isinstance(x, Tensor):
        return lambda t: Source(NUMBERS[t.dtype], t.shape, Like("tensor"), address_of(t.data), t)
    if isinstance(x, Stream):
        return _of_stream
    if _is(x, "numpy", "generic"):
        return lambda v: _of_numpy(sys.modules["numpy"].asarray(v))
    if hasattr(x, "__dlpack__"):
        return _of_dlpack
    try:
        memoryview(x)
    except TypeError:
        raise TypeError(
            f"{type(x).__name__} is not a tensor: send an array of numpy, a tensor of torch, a buffer, "
            "what has __dlpack__, a tensorferry.Tensor or a Stream"
        ) from None
    return _of_buffer


def _of_buffer(x: Any) -> Source:
    t = Tensor(x)
    return Source(NUMBERS[t.dtype], t.shape, Like("tensor"), address_of(t.data), t)


def _of_stream(x: Stream) -> Source:
    source = Source(NUMBERS[x.dtype], x.shape, None, 0, x)
    source.items = x.items
    return source


def _of_dlpack(x: Any) -> Source:
    if int(x.__dlpack_device__()[0]) == 1:  # the CPU
        try:
            import numpy

            return _of_numpy(numpy.from_dlpack(x))
        except ImportError:
            pass
    import torch

    return _of_torch(torch.from_dlpack(x))


# numpy.

_numpy_numbers: dict[Any, tuple[int, bool]] = {}
_numpy_dtypes: dict[int, Any] = {}
_NUMPY = Like("numpy")
_BYTE = ctypes.c_ubyte.from_buffer


def _of_numpy(x: Any) -> Source:
    known = _numpy_numbers.get(x.dtype)
    if known is None:
        known = _numpy_numbers[x.dtype] = _numpy_number(x.dtype)
    number, native = known
    if x.base is not None:
        _having_numpy(x)
    flags = x.flags
    if native and flags.c_contiguous:
        # ctypes.data takes a microsecond.
        data = ctypes.addressof(_BYTE(x)) if flags.writeable and x.size and number not in _BITS else x.ctypes.data
        return Source(number, x.shape, _NUMPY, data, x)
    source = Source(number, x.shape, _NUMPY, 0, x)
    source.copy = lambda address: _write_numpy(x, address)
    return source


def _having_numpy(x: Any) -> None:
    """Raise TypeError if what an array is over has lost its memory: a map may be closed, a bytearray grown."""
    base: Any = x.base if x.size else None
    while _is(base, "numpy", "ndarray"):
        base = base.base
    try:
        there = base is None or 0 <= x.ctypes.data - address_of(base) < memoryview(base).nbytes
    except (TypeError, BufferError):  # it is no buffer
        there = True
    except ValueError:
        there = False
    if not there:
        raise TypeError(_NO_MEMORY)


def _numpy_number(dtype: Any) -> tuple[int, bool]:
    number = NUMBERS.get(dtype.name, 0)
    if not number or dtype.itemsize != WIDTHS[number]:
        raise TypeError(f"an array of {dtype} cannot be sent; known: {', '.join(NAMES[1:])}")
    return number, dtype.byteorder in "=|" or dtype.isnative


def _write_numpy(x: Any, address: int) -> None:
    import numpy

    if x.size:
        buffer = (ctypes.c_ubyte * x.nbytes).from_address(address)
        numpy.copyto(numpy.ndarray(x.shape, x.dtype.newbyteorder("="), buffer), x)


def numpy_dtype(number: int) -> Any:
    """Return numpy's data type, that of ml_dtypes, or one for the bits."""
    dtype = _numpy_dtypes.get(number)
    if dtype is None:
        import numpy

        name = NAMES[number]
        if number in _BITS:
            try:
                import ml_dtypes

                dtype = numpy.dtype(getattr(ml_dtypes, name))
            except ImportError:
                dtype = numpy.dtype(_BITS[number])
        else:
            dtype = numpy.dtype(name)
        _numpy_dtypes[number] = dtype
    return dtype


# torch.

_torch_numbers: dict[Any, int] = {}
_torch_likes: dict[Any, Like] = {}


def _of_torch(x: Any) -> Source:
    number = _torch_numbers.get(x.dtype)
    if number is None:
        number = _torch_numbers[x.dtype] = number_of(x.dtype)
    like = _torch_likes.get(x.device)
    if like is None:
        like = _torch_likes[x.device] = Like("torch", None if x.device.type == "cpu" else x.device)
    strided = str(x.layout) == "torch.strided"
    if strided and x.device.type != "meta":
        having(x)
    if like.device is None and strided and x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return Source(number, tuple(x.shape), like, x.data_ptr(), x)
    if not strided or x.device.type == "meta":
        raise TypeError(f"a {x.layout} tensor on {x.device} cannot be sent; make it dense first")
    source = Source(number, tuple(x.shape), like, 0, x)
    source.copy = lambda address: write_torch(x, address)
    return source


def having(x: Any) -> Any:
    """Return a tensor of torch that has the memory of its elements. TypeError if it was freed, say."""
    try:
        if str(x.layout) == "torch.strided" and x.numel():
            storage = x.untyped_storage() if hasattr(x, "untyped_storage") else x.storage()
            last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
            if storage.nbytes() < (last + 1) * x.element_size() or (x.device.type == "cpu" and not x.data_ptr()):
                raise TypeError(_NO_MEMORY)
    except RuntimeError:  # it has no storage
        if x.device.type == "cpu":
            raise TypeError(_NO_MEMORY) from None
    return x


def write_torch(x: Any, address: int, non_blocking: bool = False) -> None:
    """Copy a tensor to an address: with non_blocking as torch's copy_, perhaps after the return."""
    import torch

    if x.numel():
        buffer = (ctypes.c_ubyte * (x.numel() * x.element_size())).from_address(address)
        with torch.no_grad():
            torch.frombuffer(buffer, dtype=x.dtype).view(x.shape).copy_(x, non_blocking=non_blocking)


# Results.


def view(like: Like, dtype: int, shape: tuple[int, ...], buffer: Any) -> Any:
    """Return a tensor over a writable buffer, which it keeps. On a device it is a copy."""
    if like.kind == "numpy":
        import numpy

        return numpy.ndarray(shape, numpy_dtype(dtype), buffer)
    if like.kind == "torch":
        import torch

        kind = getattr(torch, NAMES[dtype], None)
        if kind is not None:
            made = (
                torch.frombuffer(buffer, dtype=kind).view(shape)
                if size_of(dtype, shape)
                else torch.empty(shape, dtype=kind)
            )
            return made if like.device is None else made.to(like.device)
    made = Tensor.__new__(Tensor)
    made.data, made.shape, made.dtype = memoryview(buffer).cast("B"), shape, NAMES[dtype]
    return made


def empty(like: Like, dtype: int, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Return a tensor in ordinary memory, and its address."""
    if like.kind == "numpy":
        import numpy

        made = numpy.empty(shape, numpy_dtype(dtype))
        return made, made.ctypes.data
    if like.kind == "torch":
        import torch

        kind = getattr(torch, NAMES[dtype], None)
        if kind is not None:
            made = torch.empty(shape, dtype=kind)
            return made, made.data_ptr()
    buffer = bytearray(size_of(dtype, shape))
    return view(Like("tensor"), dtype, shape, buffer), address_of(buffer)


def default_like(kind: Optional[str] = None) -> Like:
    """Return what results are that nobody gave an example for: numpy's if it is there."""
    if kind is None:
        try:
            import numpy  # noqa: F401
        except ImportError:
            return Like("tensor")
        return _NUMPY
    if kind not in ("numpy", "torch", "tensor"):
        raise ValueError(f'like is {kind!r}; it is "numpy", "torch" or "tensor"')
    return Like(kind)


def is_writable(x: Any) -> bool:
    """Report whether results may be written into x, an array, a tensor or a buffer."""
    if isinstance(x, Tensor):
        return not x.data.readonly
    if hasattr(x, "flags") and hasattr(x, "ctypes"):
        return bool(x.flags.writeable)
    if hasattr(x, "data_ptr"):
        return not x.requires_grad
    return not memoryview(x).readonly


def storage(x: Any) -> tuple[int, int]:
    """Return where the memory of a tensor of torch begins, of which it may be a part, and its bytes."""
    whole = x.untyped_storage() if hasattr(x, "untyped_storage") else x._storage()  # before torch 2
    return whole.data_ptr(), whole.nbytes()


def held(state: Any, seen: set[int]) -> int:
    """Return the bytes of the tensors that state leads to, in containers and attributes, each memory once.

    What is in seen, by its id, is not looked at.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    left, n = [state], 0
    for _ in range(_MOST_HELD):
        if not left:
            break
        x = left.pop()
        if x is None or isinstance(x, (str, int, float)) or id(x) in seen:
            continue
        seen.add(id(x))
        if torch is not None and isinstance(x, torch.Tensor):
            place, size = storage(x) if x.layout is torch.strided else (id(x), 0)
        elif numpy is not None and isinstance(x, numpy.ndarray):
            while isinstance(x.base, numpy.ndarray):
                x = x.base
            if hasattr(x.base, "data_ptr"):  # torch's
                left.append(x.base)
                continue
            place, size = id(x), x.nbytes
        elif isinstance(x, Tensor):
            place, size = id(x.data.obj), memoryview(x.data.obj).nbytes
        else:
            more = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple, set, frozenset)) else ()
            left.extend(itertools.islice(more or (getattr(x, "__dict__", None),), _MOST_HELD))
            continue
        if -place not in seen:
            seen.add(-place)
            n += size
    return n
