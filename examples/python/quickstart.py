"""A tensor to a model of a server, and its result back. tensorferry serve starts a server."""

import numpy as np

import tensorferry as tf

x = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)
with tf.connect() as client:  # $TENSORFERRY_SERVER, else 127.0.0.1:50051
    y = client.compute("relu", x)
print(y)
assert (y == np.maximum(x, 0)).all()
