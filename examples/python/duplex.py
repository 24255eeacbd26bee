"""Results come back while the input is still being made, whatever the size of its items."""

import time

import numpy as np

import tensorferry as tf


def doubled(client, rows, width):
    """Double a tensor that is made row by row; return how many rows of the result came before the last was made."""
    arrived = early = 0  # bytes of the result

    def items():
        nonlocal early
        for i in range(rows):
            early = arrived // (4 * width)
            time.sleep(0.002)  # making a row takes time
            yield np.full(width, i, dtype=np.float32)

    call = client.call("affine", {"x": tf.Stream(items(), (rows, width), "float32")}, params={"a": "2"})
    for region in call.regions():
        arrived += region.length
    y = call.result()["y"]
    assert (y == 2 * np.arange(rows)[:, None]).all()
    return early


with tf.connect() as client:
    # An item is sent as soon as it is made: the first one says how large the chunks are.
    for rows, width in ((200, 16), (200, 1000), (64, 1 << 18)):
        early = doubled(client, rows, width)
        print(f"rows of {4 * width} bytes: {early} of {rows} results were here when the last row was made")
        assert early > 0, "no result came while the input was being made"
