"""Tensors to models, and weights to stores: the Python client of tensorferry.

    import tensorferry as tf

    with tf.connect("127.0.0.1:50051") as client:
        y = client.compute("relu", x)

The package talks to the tensorferry program, which it starts when it is first used,
over shared memory. It needs nothing but the standard library; numpy and torch are
used where they are there. It runs on Linux.
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if not _sys.platform.startswith("linux"):
    raise ImportError("tensorferry runs on Linux: it shares memory by memfd")

from ._client import Call, Client, Percentiles, Pushed, Region, Served, Statistics, Stored, Timings, connect
from ._errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Error,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LinkError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Unknown,
)
from ._model import Model, ModelError, Param, Port, model
from ._sequence import Sequence
from ._serve import Server, serve
from ._tensor import Stream, Tensor
from ._version import __version__

if _TYPE_CHECKING:
    from . import aio
    from ._train import Trainer as Trainer


def __getattr__(name: str) -> _Any:
    """Import what costs time when it is used: aio brings asyncio, Trainer torch."""
    from importlib import import_module

    if name == "aio":
        return import_module(".aio", __name__)
    if name == "Trainer":
        return import_module("._train", __name__).Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Aborted",
    "AlreadyExists",
    "Call",
    "Cancelled",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "Error",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "LinkError",
    "Model",
    "ModelError",
    "NotFound",
    "OutOfRange",
    "Param",
    "Percentiles",
    "PermissionDenied",
    "Port",
    "Pushed",
    "Region",
    "ResourceExhausted",
    "Sequence",
    "Served",
    "Server",
    "Statistics",
    "Stored",
    "Stream",
    "Tensor",
    "Timings",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unknown",
    "__version__",
    "aio",
    "connect",
    "model",
    "serve",
]

for _name in __all__:
    _public = globals().get(_name)
    if hasattr(_public, "__module__"):
        _public.__module__ = __name__  # as users write it: tensorferry.NotFound
