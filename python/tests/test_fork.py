"""Children of this process, with and without exec, while the link is in use."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import unittest

import support
import tensorferry as tf


def in_child(client, kept, queue):
    try:
        same = bytes(client.compute("echo", b"child")) == b"child"  # through a link of its own
        queue.put((same, bytes(kept), support.link_pid()))
    except BaseException as err:
        queue.put(err)


class Fork(support.Served):
    def test_fork(self):
        kept = self.client.compute("echo", b"parent" * 100)
        call = self.client.call("slow", {"x": b"1"}, params={"delay": "300ms"})
        before = support.link_pid()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(20)
                assert bytes(kept) == b"parent" * 100
                try:
                    call.result(timeout=5)
                except tf.LinkError:
                    code = 0
                del kept, call
                assert bytes(self.client.compute("echo", b"c")) == b"c"
                assert support.link_pid() != before
            except BaseException:
                code = 2
            finally:
                os._exit(code)
        self.assertEqual(bytes(call.result(timeout=10)["y"]), b"1")
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        for _ in range(20):
            self.assertEqual(bytes(self.client.compute("echo", b"p" * 600)), b"p" * 600)
        self.assertEqual(bytes(kept), b"parent" * 100, "the child's finalizers gave nothing back")
        self.assertEqual(support.link_pid(), before)

    def test_multiprocessing(self):
        context = multiprocessing.get_context("fork")
        kept = self.client.compute("echo", b"kept")
        queue = context.Queue()
        children = [context.Process(target=in_child, args=(self.client, kept, queue)) for _ in range(3)]
        for c in children:
            c.start()
        pids = set()
        for _ in children:
            got = queue.get(timeout=30)
            if isinstance(got, BaseException):
                raise got
            self.assertEqual(got[:2], (True, b"kept"))
            pids.add(got[2])
        for c in children:
            c.join(10)
            self.assertEqual(c.exitcode, 0)
        self.assertEqual(len(pids | {support.link_pid()}), 4)
        for pid in pids:  # their programs end with them
            support.eventually(lambda pid=pid: not alive(pid))

    def test_subprocess_in_the_middle_and_threads(self):
        stop = threading.Event()
        wrong = []

        def work():
            while not stop.is_set():
                try:
                    assert bytes(self.client.compute("echo", b"x" * 5000, timeout=20)) == b"x" * 5000
                except BaseException as err:
                    wrong.append(err)
                    return

        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for _ in range(10):
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        stop.set()
        for t in threads:
            t.join(20)
        self.assertEqual(wrong, [])

    def test_the_program_ends_with_python(self):
        code = (
            "import tensorferry as tf, sys\n"
            "from tensorferry import _link\n"
            "c = tf.connect(sys.argv[1]); c.compute('echo', b'1')\n"
            "print(_link._process.pid, flush=True)\n"
            "if sys.argv[2]: import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        path = os.path.dirname(os.path.dirname(tf.__file__))
        for how in ("", "killed"):
            done = subprocess.run(
                [sys.executable, "-c", code, self.server.address, how],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            pid = int(done.stdout)
            self.assertEqual(done.returncode, -signal.SIGKILL if how else 0)
            support.eventually(lambda pid=pid: not alive(pid))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    unittest.main()
