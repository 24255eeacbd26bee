"""Writes torch-VERSION.json beside it: files of torch.save of this Python's torch.

    python3 make.py

The tests read them without Python. Each case has a file, compressed and in base64, and what is in it: for
each tensor its name ("" if there is no dict), data type, shape, strides and bytes, row-major
as hex; or refused, a part of why it is not read. large has what comes before and behind 4 GiB
of zeros.
"""
import base64
import collections
import io
import json
import pathlib
import tempfile
import types
import zlib

import torch

cases = {}


def raw(t):
    t = t.detach().resolve_conj().contiguous().clone()
    return bytes(t.untyped_storage() if hasattr(t, "untyped_storage") else t.storage().untyped()).hex()


def describe(name, t):
    kept = {"name": name, "dtype": str(t.dtype)[len("torch."):], "shape": list(t.shape), "strides": list(t.stride())}
    if t.numel() <= 4096:
        kept["hex"] = raw(t)
    return kept


def encode(data):
    return base64.b64encode(zlib.compress(data, 9)).decode()


def saved(value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def add(name, value, data=None):
    tensors = value.items() if isinstance(value, dict) else [("", value)]
    cases[name] = {"file": encode(data or saved(value)), "tensors": [describe(k, t) for k, t in tensors]}


def refuse(name, value, why, **options):
    try:
        cases[name] = {"file": encode(saved(value() if isinstance(value, types.FunctionType) else value, **options)), "refused": why}
    except (AttributeError, KeyError, RuntimeError, TypeError, NotImplementedError) as err:
        print("left out:", name, err)


def numbered(dtype, *shape):
    n = 1
    for dim in shape:
        n *= dim
    values = torch.arange(n) % 2 if dtype == torch.bool else torch.arange(1, n + 1)
    if dtype.is_complex:
        return (values.to(dtype) * (1 - 2j)).reshape(shape)
    return values.to(dtype).reshape(shape)


names = "bool int8 int16 int32 int64 uint8 float16 bfloat16 float32 float64 complex64 complex128".split()
names += [n for n in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2") if hasattr(torch, n)]
for n in names:
    dtype = getattr(torch, n)
    add(n, numbered(dtype, 2, 3))
    add(n + " transposed", numbered(dtype, 3, 2).t())
    add(n + " scalar", numbered(dtype, 1)[0].clone())
    add(n + " empty", numbered(dtype, 0))

x = numbered(torch.float32, 4, 6)
add("view with an offset", x[1:3, 2:5])
add("stepped", x[::2, ::3])
add("column", x[:, 2])
add("element of a matrix", x[2, 3])
add("expanded", numbered(torch.int16, 3, 1).expand(3, 5))
add("expanded scalar", torch.tensor(7, dtype=torch.uint8).expand(2, 3))
add("expanded to 2^31", torch.tensor(7, dtype=torch.uint8).expand(1 << 31))
add("overlapping", torch.arange(6).as_strided((4, 3), (1, 1)))
add("rank 5", numbered(torch.int8, 2, 3, 1, 2, 2))
add("rank 5 permuted", numbered(torch.int8, 2, 3, 1, 2, 2).permute(4, 0, 3, 1, 2))
add("rank 8 permuted", numbered(torch.int16, 2, 1, 2, 1, 3, 1, 1, 2).permute(7, 5, 4, 1, 0, 2, 6, 3))
add("rank 32", numbered(torch.uint8, *[1] * 31, 2))
add("axes of one with other strides", torch.arange(6.0).as_strided((1, 3, 1), (99, 2, 7)))
add("empty of three axes", torch.empty(3, 0, 2))
add("empty beyond its storage", torch.empty(0, 5)[:, 3:])
add("empty at the end", torch.arange(5)[5:])
add("300 elements", numbered(torch.uint8, 300))
add("channels last", numbered(torch.float32, 2, 3, 2, 2).to(memory_format=torch.channels_last))
add("requires a gradient", torch.ones(2, requires_grad=True))
add("parameter", torch.nn.Parameter(torch.arange(3.0)))
add("parameter without a gradient", torch.nn.Parameter(torch.arange(3.0).flip(0), requires_grad=False))
if hasattr(torch, "uint16"):
    add("uint64 view with an offset", numbered(torch.uint64, 4, 6)[1:3, 2:5])
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "größe 1.x.pt")
    torch.save(x, path)
    add("saved to a file", x, path.read_bytes())
torch.manual_seed(1)
add("state dict", torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict())
add("state dict of 40", torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(20)]).state_dict())
add("dict", {"a": x, "größe/b": x.t(), "": x[0, 1:3], "p": torch.nn.Parameter(torch.ones(1)), "e": torch.empty(0)})
add("dict of one tensor twice", {"a": x[0], "b": x[0]})
add("ordered dict", collections.OrderedDict(w=torch.ones(1, dtype=torch.float16), b=torch.zeros(2)))
add("no tensors", {})

c = torch.tensor([1 + 2j, 3 - 1j])
new = hasattr(torch, "uint16")  # older ones drop what they have no way to write
if new:
    refuse("conjugated", c.conj(), "conjugated or negated")
    refuse("negated", c.conj().imag, "conjugated or negated")
refuse("quantized", lambda: torch.quantize_per_tensor(x, 0.5, 1, torch.qint8), "")
refuse("sparse", x.to_sparse(), "_rebuild_sparse_tensor")
refuse("meta", lambda: torch.empty(3, device="meta"), "_rebuild_")
refuse("complex32", lambda: torch.zeros(2, dtype=torch.complex32), "torch complex32")
refuse("list", [x], "EMPTY_LIST")
refuse("tuple", (x, x), "a value of type tuple;")
refuse("number", 5, "a value of type int;")
refuse("nested dict", {"model": {"w": x}, "epoch": 3}, '"model" in the dict is of type dict')
refuse("dict with a number", {"w": x, "epoch": 3}, '"epoch" in the dict is of type int;')
refuse("dict with numbers as keys", {3: x}, "a dict with a key of type int;")
refuse("optimizer", torch.optim.SGD([x], lr=0.1).state_dict(), "EMPTY_LIST")
refuse("module", torch.nn.Linear(1, 1), "torch.nn.modules.linear Linear")
refuse("legacy", x, "before torch 1.6", _use_new_zipfile_serialization=False)
refuse("protocol 4", x, "pickle protocol 4", pickle_protocol=4)
refuse("storage", lambda: x.untyped_storage(), "")
refuse("buffer", lambda: torch.nn.Buffer(x), "")
if new:
    with_attribute = torch.nn.Parameter(torch.ones(1))
    with_attribute.tag = 5
    refuse("parameter with an attribute", with_attribute, "")
    other = torch.ones(1)
    other.tag = 5
    refuse("tensor with an attribute", other, "")
for n in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
    refuse(n, lambda n=n: torch.zeros(2, dtype=getattr(torch, n)), "torch " + n)
script = io.BytesIO()
torch.jit.save(torch.jit.script(torch.nn.ReLU()), script)
cases["script"] = {"file": encode(script.getvalue()), "refused": ""}


class Ends:
    """Keeps the begin and the end of a large file."""

    head = tail = b""

    def write(self, data):
        if len(data) < 1 << 20 and not hasattr(self, "zeros"):
            self.head += bytes(data)
        elif len(data) < 1 << 20:
            self.tail += bytes(data)
        else:
            self.zeros = len(data)
        return len(data)

    def flush(self):
        pass


ends = Ends()
torch.save(torch.zeros(1 << 32, dtype=torch.uint8), ends)
large = {"head": encode(ends.head), "zeros": ends.zeros, "tail": encode(ends.tail)}

version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
text = json.dumps({"version": torch.__version__, "large": large, "cases": cases}, indent=0, ensure_ascii=False)
pathlib.Path(__file__).with_name(f"torch-{version}.json").write_text(text + "\n", encoding="utf-8")
