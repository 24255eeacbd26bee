"""What the workers of the benchmark compute."""

from gpt import layers

import tensorferry as tf


@tf.model(rows=1)
def echo(x):
    return x


@tf.model(rows=1, stateful=True)
def steps(x):
    return x


@tf.model(rows=1, stateful=True)
def trunk(x, call):
    return layers((1, 2), call.state, x)
