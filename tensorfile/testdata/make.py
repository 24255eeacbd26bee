"""Writes the golden files beside it with the real numpy, ml_dtypes and safetensors.

    pip install numpy ml_dtypes safetensors && python3 make.py

The tests read them without Python. expected.json says what they must find:
file -> tensor name ("" in a .npy) -> data type, shape, bytes as hex; or the kind
of refusal.
"""
import io
import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.lib import format as npy

here = pathlib.Path(__file__).parent
expected = {}


def describe(array):
    array = np.asarray(array)
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "hex": array.tobytes("C").hex(),
    }


def keep(name, data, *, tensors=None, refusal=None, metadata=None):
    (here / name).write_bytes(data)
    expected[name] = {"versions": f"numpy {np.__version__}, safetensors {safetensors.__version__}"}
    if tensors is not None:
        expected[name]["tensors"] = {k: describe(v) for k, v in tensors.items()}
    if refusal:
        expected[name]["refusal"] = refusal
    if metadata:
        expected[name]["metadata"] = metadata


def save(array, version=None):
    out = io.BytesIO()
    npy.write_array(out, array, version=version, allow_pickle=True)
    return out.getvalue()


numbers = {
    "bool": np.array([True, False, True]),
    "float16": np.array([1.5, -0.0, np.inf], "f2"),
    "float32": np.array([[1.5, -2.25, np.nan]], "f4"),
    "float64": np.array([np.pi, -1e300]),
    "complex64": np.array([1 - 2j], "c8"),
}
for bits in (8, 16, 32, 64):
    for kind in ("int", "uint"):
        info = np.iinfo(kind + str(bits))
        numbers[info.dtype.name] = np.array([[info.min], [info.max]], info.dtype)

# .npy
for name, array in {**numbers, "complex128": np.array(1 + 2j, "c16")}.items():
    keep(f"{name}.npy", save(array), tensors={"": array})
cube = np.arange(24, dtype="<i2").reshape(2, 3, 4)
for version in ((1, 0), (2, 0), (3, 0)):
    keep(f"version{version[0]}.npy", save(cube, version), tensors={"": cube})
for name, array in {
    "scalar": np.array(7, "<u4"),
    "zero_size": np.zeros((3, 0, 2), "<f4"),
    "one_axis": np.array([5], "<i8"),
    "rank32": np.full((1,) * 32, 3, "u1"),
}.items():
    keep(f"{name}.npy", save(array), tensors={"": array})
for name, array in {
    "structured": np.zeros(1, [("x", "<f4"), ("yé", "<i4")]),
    "object": np.array([None, 1], object),
    "text": np.array(["ab"]),
    "date": np.array(["2024-01-01"], "M8[D]"),
    "bfloat16": np.ones(2, ml_dtypes.bfloat16),
    "longdouble": np.ones(1, np.longdouble),
}.items():
    keep(f"{name}.npy", save(array), refusal="unsupported")
keep("rank33.npy", save(np.ones((1,) * 33, "u1")), refusal="format")

# layouts that are converted, and .npz
layouts = {
    "swapped": np.arange(6, dtype=">i4").reshape(2, 3),
    "turned": np.asfortranarray(np.arange(24, dtype="<f8").reshape(2, 3, 4)),
    "both": np.asfortranarray((np.arange(6) * (1 - 2j)).astype(">c8").reshape(3, 2)),
}
for name, array in layouts.items():
    keep(f"{name}.npy", save(array), tensors={"": array.astype(array.dtype.newbyteorder("<"))})
for name, write in {"saved": np.savez, "compressed": np.savez_compressed}.items():
    out = io.BytesIO()
    arrays = {**layouts, "folder/plain": cube, "empty": np.zeros((0, 2), "<f4"), "scalar": np.array(7, "<u4")}
    write(out, **arrays)
    keep(f"{name}.npz", out.getvalue(), tensors={k: v.astype(v.dtype.newbyteorder("<")) for k, v in arrays.items()})

# .safetensors
tensors = {
    **numbers,
    "bfloat16": np.array([1, -3.5], ml_dtypes.bfloat16),
    "float8_e4m3fn": np.array([448, -1], ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.array([57344, -1], ml_dtypes.float8_e5m2),
    "scalar": np.array(-9, "i4"),
    "zero_size": np.zeros((2, 0), "f8"),
    'name "quoted" é \\': np.array([1], "u1"),
}
metadata = {"format": "np", "é": "\"\n\\"}
keep("all.safetensors", safetensors.numpy.save(tensors, metadata), tensors=tensors, metadata=metadata)
keep("empty.safetensors", safetensors.numpy.save({}), tensors={})

(here / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
