"""Models of stress.py's workers: echoes that are quick or slow to load, and that compute slowly if asked to."""

import time
from typing import Any

import tensorferry as tf

LOAD_SECONDS = 0.5


@tf.model(rows=1, array="tensor", params={"delay": tf.Param(float, 0.0), "copy": tf.Param(bool, False)})
def echo(x: Any, call: Any) -> Any:
    if call.params["delay"]:
        time.sleep(call.params["delay"])
    return tf.Tensor(bytes(x.data), x.shape, x.dtype) if call.params["copy"] else x


def quick() -> Any:
    return echo


def slow() -> Any:
    time.sleep(LOAD_SECONDS)
    return echo


def __getattr__(name: str) -> Any:
    """Name a model for each of quick0, slow1 and so on: stress.py tells processes apart by what they serve."""
    kind = name.rstrip("0123456789")
    if kind != name and kind in ("quick", "slow"):
        return globals()[kind]
    raise AttributeError(name)
