"""Results come back while the input is still being made: here, before its last rows are."""

import numpy as np

import tensorferry as tf

ROWS, WIDTH = 16384, 1024  # 64 MiB
arrived = 0  # bytes of the result


def rows():
    """Yield the rows, 256 at a time."""
    for first in range(0, ROWS, 256):
        if first == ROWS - 256:
            assert arrived > 0, "no result came while the input was being made"
            print(f"{arrived >> 20} MiB of results are here, and {first} of {ROWS} rows are made")
        yield np.full((256, WIDTH), first, dtype=np.float32)


with tf.connect() as client:
    call = client.call("affine", {"x": tf.Stream(rows(), (ROWS, WIDTH), "float32")}, params={"a": "2"})
    for region in call.regions():
        arrived += region.length
    y = call.result()["y"]

assert arrived == y.nbytes
assert (y == 2 * (np.arange(ROWS) // 256 * 256)[:, None]).all()
print(call.timings)
