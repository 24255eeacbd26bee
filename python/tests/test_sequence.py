"""Sequences: calls of a model, one after the other, that share a state on the server."""

from __future__ import annotations

import asyncio
import gc
import threading
import unittest

import support
import tensorferry as tf
from support import eventually


class Closed:
    """Is counted until it is closed."""

    open = 0

    def __init__(self) -> None:
        Closed.open += 1

    def close(self) -> None:
        Closed.open -= 1


@tf.model(
    array="tensor", rows=1, stateful=True, params={"begin": tf.Param(int, 0, "")}, inputs={"x": ("uint8", (-1, 2))}
)
def sums(x, call):
    """Answer each row with the sum of all so far, modulo 256, and their number; of one that begins with 255, fail."""
    state = call.state
    state.setdefault("closed", Closed()) if "closed" not in state else None
    total = state.get("total", call.params["begin"])
    y = call.empty(x.shape, "uint8")
    for i in range(0, len(x.data), 2):
        if x.data[i] == 255:
            raise tf.ModelError("a row that is none")
        total += x.data[i]
        state["rows"] = state.get("rows", 0) + 1
        y.data[i], y.data[i + 1] = total % 256, state["rows"] % 256
    state["total"] = total
    return y


def row(first: int, n: int = 1) -> tf.Tensor:
    return tf.Tensor(bytes([first, 0] * n), dtype="uint8", shape=(n, 2))


class Sequences(unittest.TestCase):
    server: tf.Server
    client: tf.Client

    @classmethod
    def setUpClass(cls) -> None:
        support.program()
        cls.server = tf.serve(sums, port=0)
        cls.addClassCleanup(cls.server.close)
        cls.client = tf.connect(cls.server.address)
        cls.addClassCleanup(cls.client.close)

    def tearDown(self) -> None:
        eventually(lambda: Closed.open == 0)
        eventually(lambda: self.client.info()["counters"]["sequences"] == 0)

    def test_steps_share_a_state_and_sequences_do_not(self) -> None:
        with (
            self.client.sequence("sums", max_rows=1000) as a,
            self.client.sequence("sums", 1000, params={"begin": 7}) as b,
        ):
            self.assertIsNone(a.timings)
            for i in range(1, 60):
                self.assertEqual(bytes(a.step(row(2))), bytes([2 * i, i]))
                self.assertEqual(bytes(b.step(x=row(1, 2))), bytes([7 + 2 * i - 1, 2 * i - 1, 7 + 2 * i, 2 * i]))
            self.assertEqual((a.rows, b.rows), (59, 118))
            self.assertGreater(a.timings.total, 0)
            out = bytearray(2)
            a.step(row(2), out={"y": memoryview(out).cast("B", (1, 2))})
            self.assertEqual(out, bytes([120, 60]))
            self.assertEqual(bytes(self.client.compute("sums", row(5))), b"\5\1")
        self.assertIn("60 rows, closed", repr(a))
        with self.assertRaisesRegex(ValueError, "the sequence is closed"):
            a.step(row(1))

    def test_what_does_not_fit_changes_nothing(self) -> None:
        with self.client.sequence("sums", max_rows=3) as s:
            s.step(row(1))
            for bad, says in (
                (tf.Tensor(b"123", dtype="uint8", shape=(1, 3)), "wanted uint8 of shape"),
                (row(1, 3), "a step of 3 rows, and its sequence has room for 2 of its 3"),
            ):
                with self.assertRaisesRegex(tf.FailedPrecondition, says):
                    s.step(bad)
            with self.assertRaisesRegex(tf.InvalidArgument, "takes inputs"):
                s.step(z=row(1))
            for wrong in (s.step, lambda: s.step(row(1), z=row(1)), lambda: s.step(row(1), out=bytearray(2))):
                with self.assertRaisesRegex(TypeError, "step takes a tensor|out is by result"):
                    wrong()
            self.assertEqual(bytes(s.step(row(1))), b"\2\2")
        for model, rows, error in (("none", 1, tf.NotFound), ("sums", 0, tf.InvalidArgument)):
            with self.assertRaises(error):
                self.client.sequence(model, rows)
        with self.assertRaises(TypeError):
            self.client.sequence("sums", 1.5)

    def test_a_step_that_fails_ends_it(self) -> None:
        with self.client.sequence("sums", max_rows=9) as s:
            s.step(row(1, 2))
            with self.assertRaisesRegex(tf.Error, "a row that is none"):
                s.step(row(255))
            with self.assertRaisesRegex(tf.FailedPrecondition, "over after 2 rows: a step has failed") as lost:
                s.step(row(1))
            self.assertEqual(lost.exception.reason, "STATE_LOST")

    def test_two_threads(self) -> None:
        with self.client.sequence("sums", max_rows=1000) as s:
            done, refused = [], []

            def steps() -> None:
                for _ in range(50):
                    try:
                        done.append(s.step(row(1)))
                    except tf.FailedPrecondition as err:
                        refused.append(err)

            threads = [threading.Thread(target=steps) for _ in range(3)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            self.assertEqual(len(done) + len(refused), 150)
            self.assertEqual(s.rows, len(done))

    def test_one_that_is_dropped_ends(self) -> None:
        s = self.client.sequence("sums", max_rows=9)
        s.step(row(1))
        del s
        gc.collect()
        self.client.compute("sums", row(1))  # what was dropped is told with the next use

    def test_aio(self) -> None:
        async def main() -> None:
            async with tf.aio.connect(self.server.address) as client:
                async with client.sequence("sums", max_rows=9) as s:
                    for i in range(1, 4):
                        self.assertEqual(bytes(await s.step(row(1))), bytes([i, i]))
                    self.assertEqual(s.rows, 3)
                with self.assertRaises(tf.NotFound):
                    async with client.sequence("none", max_rows=9):
                        pass
                with self.assertRaisesRegex(ValueError, "use async with"):
                    await client.sequence("sums", max_rows=9).step(row(1))
                with self.assertRaisesRegex(TypeError, "use async with"), client.sequence("sums", max_rows=9):
                    pass

        asyncio.run(main())


if __name__ == "__main__":
    unittest.main()
