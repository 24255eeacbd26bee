"""Tensors to models, and weights to stores: the Python client of tensorferry.

    import tensorferry as tf

    with tf.connect("127.0.0.1:50051") as client:
        y = client.compute("relu", x)

The package talks to the tensorferry program, which it starts when it is first used,
over shared memory. It needs nothing but the standard library; numpy and torch are
used where they are there. It runs on Linux.
"""

import sys as _sys

if not _sys.platform.startswith("linux"):
    raise ImportError("tensorferry runs on Linux: it shares memory by memfd")

from ._client import Call, Client, Pushed, Region, Stored, Timings, connect
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
from ._serve import Server, serve
from ._tensor import Stream, Tensor
from ._version import __version__

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
    "PermissionDenied",
    "Port",
    "Pushed",
    "Region",
    "ResourceExhausted",
    "Server",
    "Stored",
    "Stream",
    "Tensor",
    "Timings",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unknown",
    "__version__",
    "connect",
    "model",
    "serve",
]
