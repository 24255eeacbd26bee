"""What the workers of the benchmark compute."""

import numpy as np
from gpt import layers

import tensorferry as tf


@tf.model(rows=1)
def echo(x):
    return x


@tf.model(rows=1)
def relu(x):
    return np.maximum(x, 0)


@tf.model(rows=1, stateful=True)
def steps(x):
    return x


@tf.model(rows=1, stateful=True)
def trunk(x, call):
    return layers((1, 2), call.state, x)
