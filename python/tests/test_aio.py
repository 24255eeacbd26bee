"""The client for asyncio against a real server: tasks, cancels, streams, other loops and threads."""

import asyncio
import gc
import os
import signal
import tempfile
import threading
import time
import unittest

import support
import tensorferry as tf
from support import numpy, pattern
from tensorferry import aio

MIB = 1 << 20


def wait(coroutine, seconds=60):
    """Run a coroutine in a loop of its own."""
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


class Aio(support.Served):
    def tearDown(self):
        self.assertEqual(aio._readers, {})  # no loop is left that reads

    def connect(self):
        return tf.aio.connect(self.server.address)

    async def calls(self, client, n):
        """Wait until the server works on n calls."""
        while (await client.info())["counters"]["calls"] != n:
            await asyncio.sleep(0.01)

    def test_it_does_what_the_other_client_does(self):
        async def main():
            async with self.connect() as c:
                self.assertEqual(repr(c), f"<tensorferry.aio.Client of {self.server.address}>")
                self.assertEqual(bytes(await c.compute("echo", b"abc")), b"abc")
                out = bytearray(3)
                await c.compute("echo", b"abc", out=out)
                self.assertEqual(out, b"abc")
                self.assertEqual((await c.push({"a": b"12", "b": pattern(3 * MIB)}))[1].bytes, 3 * MIB)
                self.assertEqual([s.name for s in await c.list()], ["a", "b"])
                self.assertEqual(bytes((await c.pull("b", like="tensor"))["b"]), pattern(3 * MIB))
                self.assertEqual(sorted(await c.delete("a", "b")), ["a", "b"])
                self.assertEqual(list(await c.sources()), list(self.client.sources()))
                self.assertTrue(await c.models())
                self.assertEqual((await c.info())["version"], self.client._link.host["version"])
                x = await c.empty(3, "uint8", like="tensor")
                self.assertEqual((await c.compute("echo", x)).shape, (3,))
            await c.close()
            self.assertIn("closed", repr(c))
            with self.assertRaisesRegex(ValueError, "the client is closed"):
                await c.compute("echo", b"abc")
            other = self.connect()  # and nothing else
            self.assertEqual(bytes(await other.compute("echo", b"abc")), b"abc")
            await other.close()

        wait(main())

    def test_errors_are_those_of_the_other_client(self):
        async def main():
            with self.assertRaises(ValueError):
                tf.aio.connect(self.server.address, lanes=65)
            async with self.connect() as c:
                with self.assertRaises(tf.NotFound):
                    await c.compute("nix", b"1")
                with self.assertRaises(TypeError):
                    await c.call("echo", b"1")
                with self.assertRaises(tf.DeadlineExceeded):
                    await c.compute("slow", b"1", params={"delay": "30s"}, timeout=0.1)
                call = await c.call("slow", {"x": b"123"}, params={"delay": "300ms"})
                with self.assertRaises(tf.DeadlineExceeded):
                    await call.result(timeout=0.01)
                with self.assertRaises(tf.DeadlineExceeded):
                    async for _ in call.regions(timeout=0.01):
                        pass
                self.assertFalse(call.done())
                self.assertIsNone(call.timings)
                self.assertEqual(bytes((await call.result())["y"]), b"123")
                self.assertTrue(call.done())
                self.assertGreater(call.timings.total, 0.2)

        wait(main())

    def test_64_tasks_share_a_client(self):
        async def work(c, i):
            for k in range(20):
                x = pattern((i * 7919 + k * 104_729) % (MIB // 4 if k % 10 else 3 * MIB) + 1, i)
                self.assertEqual(bytes(await c.compute("echo", x, timeout=60)), x)

        async def main():
            async with self.connect() as c:
                await asyncio.gather(*[work(c, i) for i in range(64)])
            self.assertFalse(c._client._link.pending)

        wait(main())

    def test_cancelling_a_task_cancels_its_call(self):
        async def regions(call):
            async for _ in call.regions():
                pass

        async def main():
            async with self.connect() as c:
                slow = {"inputs": {"x": b"1"}, "params": {"delay": "30s"}}
                for start in (
                    lambda: c.compute("slow", b"1", params={"delay": "30s"}),
                    lambda: asyncio.wait_for(c.compute("slow", b"1", params={"delay": "30s"}), 20),
                ):
                    task = asyncio.ensure_future(start())
                    await self.calls(c, 1)
                    task.cancel()
                    with self.assertRaises(asyncio.CancelledError):
                        await task
                    await self.calls(c, 0)
                for wait_for in (lambda call: call.result(), regions):
                    call = await c.call("slow", **slow)
                    task = asyncio.ensure_future(wait_for(call))
                    await self.calls(c, 1)
                    task.cancel()
                    with self.assertRaises(asyncio.CancelledError):
                        await task
                    await self.calls(c, 0)
                    with self.assertRaises(tf.Cancelled):
                        await call.result()
                with await c.call("slow", **slow) as call:
                    self.assertEqual(repr(call), "<tensorferry.aio.Call of slow, running>")
                    await self.calls(c, 1)
                await self.calls(c, 0)
                call = await c.call("slow", **slow)
                call.cancel()
                with self.assertRaises(tf.Cancelled):
                    await call.result()
                call = await c.call("slow", **slow)
                await self.calls(c, 1)
                del call  # dropping it cancels it
                gc.collect()
                await c.compute("echo", b"1")
                await self.calls(c, 0)

        wait(main())

    def test_regions_cover_the_result(self):
        async def main():
            x, seen = pattern(8 * MIB), bytearray(8 * MIB)
            async with self.connect() as c:
                call = await c.call("echo", {"x": x})
                async for r in call.regions():
                    seen[r.offset : r.offset + r.length] = r.data
                self.assertEqual(seen, x)
                self.assertEqual(bytes((await call.result())["y"]), x)
                call = await c.call("echo", {"x": x}, regions=False)
                self.assertEqual([r.length async for r in call.regions()], [8 * MIB])

        wait(main())

    def test_inputs_come_from_asynchronous_generators(self):
        async def items(x, step):
            for i in range(0, len(x), step):
                if i % 3 == 0:
                    await asyncio.sleep(0)
                yield x[i : i + step]

        async def main():
            want = pattern(5 * MIB + 3)
            async with self.connect() as c:
                for step in (99_983, MIB, 3 * MIB, 6 * MIB):
                    s = tf.Stream(items(want, step), (len(want),), "uint8")
                    call = await c.call("echo", {"x": s}, like="tensor")
                    self.assertEqual(bytes((await call.result())["y"]), want)
                    s = tf.Stream(items(want, step), (len(want),), "uint8")
                    await c.push({"empty": tf.Stream(items(b"", 1), (0,), "uint8"), "s": s, "b": b"beside"})
                    self.assertEqual(bytes((await c.pull("s", like="tensor"))["s"]), want)
                s = tf.Stream([want], (len(want),), "uint8")  # an ordinary iterable
                self.assertEqual((await c.compute("echo", s)).nbytes, len(want))
                await c.delete("*")

        wait(main())

    def test_a_generator_may_wait_for_results_of_its_own_call(self):
        async def main():
            news, began = asyncio.Queue(), 0

            async def items():
                nonlocal began
                for i in range(8):
                    if i >= 4:
                        began += await news.get()
                    yield bytes([i]) * MIB

            async with self.connect() as c:
                call = await c.call("echo", {"x": tf.Stream(items(), (8, MIB), "uint8")}, like="tensor")
                async for r in call.regions():
                    news.put_nowait(r.length)
                    for _ in range(3):
                        news.put_nowait(0)
                self.assertEqual(bytes((await call.result())["y"]), b"".join(bytes([i]) * MIB for i in range(8)))
            self.assertGreater(began, 0)

        wait(main())

    def test_a_row_may_be_made_from_the_result_of_the_one_before(self):
        async def main():
            async with self.connect() as c:
                for width in (1, 1000, 64 << 10, 1 << 20, (1 << 20) + 8):
                    results = asyncio.Queue()

                    async def items(results=results, width=width):
                        row = bytes([1]) * width
                        for _ in range(20):
                            yield row
                            row = bytes([(await results.get()) + 1]) * width

                    x = tf.Stream(items(), (20, width), "uint8")
                    call = await c.call("echo", {"x": x}, like="tensor", timeout=60)
                    came = row = 0
                    async for region in call.regions():
                        came += region.length
                        while came >= (row + 1) * width:
                            results.put_nowait(region.tensor.data[row * width])
                            row += 1
                    y = bytes((await call.result())["y"])
                    self.assertEqual(y, b"".join(bytes([i]) * width for i in range(1, 21)))

        wait(main(), 120)

    def test_a_timeout_names_what_was_made_and_not_sent(self):
        async def items():
            yield b"1234"
            yield b"12"
            await asyncio.sleep(60)

        async def main():
            async with self.connect() as c:
                call = await c.call("echo", {"x": tf.Stream(items(), (8,), "uint8")}, timeout=2)
                for timeout in (0.5, None):
                    with self.assertRaisesRegex(tf.DeadlineExceeded, "; 2 bytes of 'x' were made and not sent"):
                        await call.result(timeout)

        wait(main())

    def test_a_generator_that_breaks_its_word_fails(self):
        closed = []

        async def items(*all):
            try:
                for item in all:
                    yield item
                    if item == b"wait":
                        await asyncio.sleep(60)
                    if item == b"raise":
                        raise ZeroDivisionError
            finally:
                closed.append(all)

        async def main():
            async with self.connect() as c:
                for error, all in (
                    (ValueError, [b"1"] * 3),
                    (ValueError, [b"1" * 9]),
                    (ValueError, [b"1"] * 9),
                    (TypeError, [3]),
                    (ZeroDivisionError, [b"raise", b"123"]),
                ):
                    call = await c.call("echo", {"x": tf.Stream(items(*all), (8,), "uint8")})
                    with self.assertRaises(error):
                        await call.result()
                task = asyncio.ensure_future(c.compute("echo", tf.Stream(items(b"wait"), (8,), "uint8")))
                await self.calls(c, 1)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                await self.calls(c, 0)
                while list(closed[-1]) != [b"wait"]:
                    await asyncio.sleep(0.01)
                # The server refuses the call while its generator rests.
                with self.assertRaises(tf.NotFound):
                    await c.compute("nix", tf.Stream(items(b"wait"), (8,), "uint8"), timeout=20)
                self.assertEqual(bytes(await c.compute("echo", b"1")), b"1")
            with self.assertRaisesRegex(TypeError, "'x' are asynchronous; tensorferry.aio takes them"):
                self.client.call("echo", {"x": tf.Stream(items(), (8,), "uint8")})

        wait(main())

    def test_a_full_quota_does_not_hold_up_the_loop(self):
        async def main():
            async with self.connect() as c:
                link, hold = c._client._link, []
                link.trim()
                for size in (link.host["memory"] // 8, 4 * MIB, 4096):
                    try:
                        while True:
                            hold.append(await aio._drive(link._take(size, 0.0)))
                    except tf.Error:
                        pass
                # More than the program lets wait at a time.
                tasks = [asyncio.ensure_future(c.compute("echo", b"1" * 10_000)) for _ in range(1500)]
                await asyncio.sleep(0.3)
                self.assertFalse(any(task.done() for task in tasks))
                hold.clear()
                link.trim()
                for task in tasks:
                    self.assertEqual(len(bytes(await task)), 10_000)

        wait(main())

    def test_closing_fails_what_is_under_way(self):
        async def main():
            async with self.connect() as c:
                tasks = [asyncio.ensure_future(c.compute("slow", b"1", params={"delay": "30s"})) for _ in range(5)]
                await self.calls(c, 5)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                self.assertIsInstance(result, tf.Error)

        wait(main())

    def test_the_program_is_killed(self):
        async def main():
            async with self.connect() as c:
                call = await c.call("slow", {"x": b"1"}, params={"delay": "30s"})
                tasks = [asyncio.ensure_future(c.compute("slow", b"1", params={"delay": "30s"})) for _ in range(5)]
                await asyncio.sleep(0.1)
                os.kill(support.link_pid(), signal.SIGKILL)
                for waiting in (call.result(), *tasks):
                    with self.assertRaises(tf.LinkError):
                        await waiting
                # The first of them starts another, and all use one connection of it.
                y = await asyncio.gather(*[c.compute("echo", b"2") for _ in range(10)])
                self.assertEqual([bytes(one) for one in y], [b"2"] * 10)
                self.assertEqual(c._client._connection, 1)

        wait(main())

    def test_there_is_no_thread_and_no_descriptor_for_a_call(self):
        async def work(c):
            for _ in range(5):
                await c.compute("echo", b"1" * 1000)

        async def main():
            async with self.connect() as c:
                await asyncio.gather(*[work(c) for _ in range(20)])
                return threading.enumerate(), support.descriptors()

        self.client.compute("echo", b"1")  # the program runs
        wait(main())
        fds, threads = support.descriptors(), threading.enumerate()
        for _ in range(10):
            within = wait(main())
            self.assertEqual(within[0], threads)
            self.assertLessEqual(within[1], fds + 6)  # of the loop, and one of the link
        self.assertLessEqual(support.descriptors(), fds)

    def test_loops_and_threads_share_the_link(self):
        wrong, deadline = [], time.monotonic() + 3

        def guarded(work):
            def run(i):
                try:
                    work(i)
                except BaseException as err:
                    wrong.append(err)

            return run

        def thread(i):
            while time.monotonic() < deadline:
                x = pattern(1 + i * 5000, i)
                self.assertEqual(bytes(self.client.compute("echo", x, timeout=30)), x)

        def loop(i):
            async def work(c, k):
                while time.monotonic() < deadline:
                    x = pattern(1 + k * 5000, i * 10 + k)
                    self.assertEqual(bytes(await c.compute("echo", x, timeout=30)), x)
                    if k == 3:
                        await asyncio.sleep(0.01)

            async def main():
                async with self.connect() as c:
                    await asyncio.gather(*[work(c, k) for k in range(8)])

            wait(main())

        threads = [threading.Thread(target=guarded(work), args=(i,)) for i in range(3) for work in (thread, loop)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertEqual(wrong, [])
        self.assertFalse(any(t.is_alive() for t in threads))
        self.assertEqual(self.client._link._waiting, {})

    def test_a_loop_that_waits_longer_does_not_hold_up_a_thread(self):
        async def main():
            async with self.connect() as c:
                task = asyncio.ensure_future(c.compute("slow", b"1", params={"delay": "1s"}))
                await self.calls(c, 1)
                began = time.monotonic()
                for _ in range(20):  # in the loop's thread, which does not read now
                    self.client.compute("echo", b"1")
                thread = threading.Thread(target=lambda: [self.client.compute("echo", b"1") for _ in range(20)])
                thread.start()
                thread.join()
                self.assertLess(time.monotonic() - began, 0.9)
                await task

        wait(main())

    def test_the_loop_rests_while_another_reads(self):
        async def main():
            async with self.connect() as c:
                link, drains = c._client._link, []
                drain = link.drain
                link.drain = lambda: drains.append(1) or drain()
                try:
                    with link._reading:  # a thread that is slow to dispatch
                        task = asyncio.ensure_future(c.compute("echo", b"1"))
                        await asyncio.sleep(0.5)
                        self.assertFalse(task.done())
                        self.assertLess(len(drains), 5)
                    link._pass_on()  # as a reader does when it leaves
                    began = time.monotonic()
                    await task
                    self.assertLess(time.monotonic() - began, 0.4)  # not by the look of each second
                finally:
                    del link.drain

        wait(main())

    def test_a_thread_dispatches_for_the_loop(self):
        async def main():
            async with self.connect() as c:
                slow = threading.Thread(target=lambda: self.client.compute("slow", b"1", params={"delay": "1500ms"}))
                slow.start()
                await self.calls(c, 1)
                began, cpu = time.monotonic(), time.process_time()
                for _ in range(20):
                    await c.compute("echo", b"1")
                await c.compute("slow", b"1", params={"delay": "300ms"})
                self.assertLess(time.monotonic() - began, 1)
                self.assertLess(time.process_time() - cpu, 0.5)
                slow.join()

        wait(main())

    def test_a_forked_child_has_no_descriptor_of_the_link(self):
        async def main():
            async with self.connect() as c:
                task = asyncio.ensure_future(c.compute("slow", b"1", params={"delay": "300ms"}))
                await self.calls(c, 1)
                (reader,) = aio._readers.values()
                pid = os.fork()
                if pid == 0:
                    try:
                        os.fstat(reader.fd)
                    except OSError:
                        os._exit(0)
                    os._exit(1)
                self.assertEqual(os.waitpid(pid, 0)[1], 0)
                await task

        wait(main())

    def test_a_loop_that_ends_with_calls_leaves_nothing(self):
        fds = support.descriptors()
        for _ in range(5):
            loop = asyncio.new_event_loop()
            client = self.connect()
            loop.run_until_complete(client.compute("echo", b"1"))
            task = loop.create_task(client.compute("slow", b"1", params={"delay": "500ms"}))
            loop.run_until_complete(asyncio.sleep(0.05))
            loop.close()
            task._log_destroy_pending = False
            del task, client
        wait(self.connect().compute("echo", b"1"))
        self.assertLessEqual(support.descriptors(), fds)
        support.eventually(lambda: self.client.compute("echo", b"1") and not self.client._link.pending)

    @support.needs_torch
    def test_modules_come_back(self):
        async def main():
            net, other = support.torch.nn.Linear(3, 4), support.torch.nn.Linear(3, 4)
            async with self.connect() as c:
                await c.push_module(net, "net/")
                await c.load_into(other, "net/")
                await c.delete("**")
            self.assertTrue(support.torch.equal(net.weight, other.weight))

        wait(main())

    def test_results_go_to_files(self):
        async def main():
            async with self.connect() as c:
                with tempfile.TemporaryDirectory() as folder:
                    path = os.path.join(folder, "y")
                    await (await c.call("echo", {"x": pattern(5 * MIB)}, out={"y": path})).result()
                    with open(path, "rb") as file:
                        self.assertEqual(file.read(), pattern(5 * MIB))

        wait(main())

    @support.needs_numpy
    def test_results_are_of_the_library_of_the_inputs(self):
        async def main():
            async with self.connect() as c:
                x = numpy.arange(12, dtype="f4").reshape(3, 4)
                self.assertTrue((await c.compute("relu", x) == x).all())

        wait(main())


if __name__ == "__main__":
    unittest.main()
