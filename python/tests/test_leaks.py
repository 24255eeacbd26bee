"""Descriptors, mappings and memory of the link go back to where they were."""

import gc
import os
import unittest

import support
import tensorferry as tf
from tensorferry import _link

MIB = 1 << 20


def threads_and_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


class Leaks(support.Served):
    def test_connects_and_closes(self):
        def some(n):
            for _ in range(n):
                with tf.connect(self.server.address) as c:
                    c.compute("echo", b"1" * 1000)

        some(20)
        fds, maps, theirs = support.descriptors(), support.mappings(), threads_and_files(support.link_pid())
        some(300)
        self.assertLessEqual(support.descriptors(), fds + 2)
        self.assertLessEqual(support.mappings(), maps + 2)
        support.eventually(lambda: threads_and_files(support.link_pid()) <= theirs + 3)

    def test_clients_that_nobody_closes(self):
        for _ in range(20):
            tf.connect(self.server.address).compute("echo", b"1")
        theirs = threads_and_files(support.link_pid())
        for _ in range(100):
            tf.connect(self.server.address).compute("echo", b"1")
        gc.collect()
        support.eventually(
            lambda: self.client.compute("echo", b"1") and threads_and_files(support.link_pid()) <= theirs + 3
        )

    def test_results_give_their_memory_back(self):
        quota = self.client._link.host["memory"]
        x = b"x" * (32 * MIB)
        for _ in range(max(3 * quota // len(x), 4) if quota <= 1 << 30 else 40):
            y = self.client.compute("echo", x)
            self.assertIsNotNone(
                self.client._link.find(tf._tensor.address_of(y.data), len(x)), "it is whole, not pieces"
            )

    def test_cycles_are_collected_when_the_quota_is_full(self):
        quota = self.client._link.host["memory"]
        gc.disable()
        try:
            for _ in range(10):
                cycle = [self.client.empty(quota // 5, "uint8", like="tensor")]
                cycle.append(cycle)
        finally:
            gc.enable()

    def test_a_full_quota_says_so(self):
        kept = []
        self.addCleanup(kept.clear)
        link = self.client._link
        with self.assertRaises(tf.ResourceExhausted) as e:
            while True:
                kept.append(link.take(link.host["memory"] // 5, 0.1).export(1))
        self.assertIn("memory", str(e.exception))
        kept.clear()
        self.assertEqual(bytes(self.client.compute("echo", b"1")), b"1")

    def test_links_that_end_leave_nothing(self):
        self.client.compute("echo", b"1" * 5 * MIB)
        _link._stop()
        gc.collect()
        fds = support.descriptors()
        self.assertEqual(support.mappings(), 0)
        for _ in range(10):
            self.client.compute("echo", b"1" * 5 * MIB)
            _link._stop()
            self.assertEqual((support.mappings(), support.descriptors()), (0, fds))


if __name__ == "__main__":
    unittest.main()
