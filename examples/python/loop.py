"""Each row is made from the result of the one before: a call that answers while it is asked.

The client of asyncio makes items while it waits for results. In an ordinary client the thread that waits
makes them, too, so there they cannot wait for a result of their own call.
"""

import asyncio

import numpy as np

import tensorferry as tf

ROWS, WIDTH = 100, 64


async def main():
    results = asyncio.Queue()

    async def items():
        row = np.ones(WIDTH, np.float32)
        for _ in range(ROWS):
            yield row
            row = await results.get()

    async with tf.aio.connect() as client:
        x = tf.Stream(items(), (ROWS, WIDTH), "float32")
        call = await client.call("affine", {"x": x}, params={"a": "0.5", "b": "1"}, timeout=60)
        came = 0  # rows, in order: one is on its way at a time
        async for region in call.regions():
            for y in region.tensor[region.rows]:
                results.put_nowait(y.copy() * 2)
                came += 1
        y = (await call.result())["y"]
    assert came == ROWS
    want = 1.0
    for row in y:
        assert (row == want * 0.5 + 1).all()
        want = row[0] * 2
    print(f"{ROWS} rows, each made from the result of the one before; the last is {y[-1][0]}")


asyncio.run(main())
