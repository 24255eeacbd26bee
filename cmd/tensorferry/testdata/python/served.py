"""Models of the tests of the command, in the standard library alone."""

import os
import time

import tensorferry as tf


@tf.model(rows=1, about={"parameters": 1234}, array="tensor")
def echo(x):
    return x


@tf.model(rows=1, params={"seconds": tf.Param(float, 0.0)}, array="tensor")
def slow(x, call):
    until = time.monotonic() + call.params["seconds"]
    while time.monotonic() < until and not call.cancelled:
        time.sleep(0.001)
    return x


@tf.model(array="tensor")
def pid(x):
    return os.getpid().to_bytes(8, "little")


@tf.model(rows=1, array="tensor")
def divides(x):
    return x if 1 // 0 else x


@tf.model(rows=1, array="tensor")
def loses_rows(x):
    return b"1"


def broken():
    raise RuntimeError("no weights here")
