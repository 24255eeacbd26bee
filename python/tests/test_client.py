"""The client against a real server: errors, limits, cancels, streams, files, threads."""

import array
import contextlib
import errno
import functools
import gc
import io
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from unittest import mock

import support
import tensorferry as tf
from support import numpy, pattern
from tensorferry import _client, _link, _tensor, _wire

MIB = 1 << 20


class Retries(unittest.TestCase):
    def test_a_server_that_comes_back_is_found_and_counted(self):
        server = support.Server()
        address = server.address
        with tf.connect(address, retry="exponential", lanes=0) as client, tf.connect(address) as other:
            call = client.call("slow", {"x": b"abc"}, params={"delay": "300ms"})
            lost = other.call("slow", {"x": b"abc"}, params={"delay": "300ms"})
            support.eventually(lambda: other.info()["counters"]["calls"] == 2)
            server.kill()
            with self.assertRaises(tf.Unavailable):
                lost.result()
            again = threading.Thread(target=lambda: self.addCleanup(support.Server(listen=address).stop))
            again.start()
            self.assertEqual(bytes(call.result()["y"]), b"abc")
            self.assertEqual(bytes(client.compute("echo", b"1")), b"1")
            again.join()
            said = client.statistics()
            self.assertEqual((said.calls, said.failures.get("UNAVAILABLE", 0) > 0), (2, True))
            self.assertGreater(said.retries, 0)
            self.assertGreaterEqual(said.received, 4)
            self.assertGreater(said.total.max, said.server.p50)

    def test_what_is_not_repeated_says_so(self):
        with tf.connect("nowhere.invalid:1", retry=[0.01, 0.02]) as client:
            with self.assertRaises(tf.Unavailable) as e:
                client.compute("echo", b"1")
            self.assertFalse(e.exception.retryable)
            self.assertEqual(client.statistics().retries, 0)
        with tf.connect("127.0.0.1:1", retry=[0.01, 0.02], break_after=2) as client:
            with self.assertRaises(tf.Unavailable) as e:
                client.compute("echo", b"1")
            self.assertTrue(e.exception.retryable)
            self.assertIn("too many attempts have failed", str(e.exception))
        with self.assertRaisesRegex(tf.InvalidArgument, "write none, exponential"):
            tf.connect("127.0.0.1:1", retry="often")


class Errors(support.Served):
    def test_a_name_goes_there_and_back_or_is_refused(self):
        for name in ("é", "a//b", "x/__metadata__", "a b", "\U0001f600"):
            self.assertEqual(self.client.push({name: b"1"})[0].name, name)
            self.assertEqual(list(self.client.pull(_client._literal(name))), [name])
            self.assertEqual(self.client.delete(name), [name])
        for name in ("", "a/", "__metadata__", "a\nb", "a\0b", "a\x7fb", "x" * 1000):
            with self.assertRaises(tf.InvalidArgument, msg=repr(name)):
                self.client.push({name: b"1"})
        for refused in (
            lambda name: self.client.push({name: b"1"}),
            lambda name: self.client.push({"a": b"1"}, metadata={"a": {name: "1"}}),
            lambda name: self.client.push({"a": b"1"}, metadata={"a": {"k": name}}),
            self.client.pull,
            self.client.delete,
            self.client.list,
            lambda name: self.client.compute(name, b"1"),
            lambda name: self.client.call("echo", {name: b"1"}),
            lambda name: self.client.call("affine", {"x": b"1"}, params={"a": name}),
            lambda name: self.client.call("echo", {"x": b"1"}, out={name: bytearray(1)}),
        ):
            with self.assertRaisesRegex(ValueError, r"'.udc80w' has a lone surrogate.*use another name"):
                refused("\udc80w")
        self.assertEqual(self.client.list(), [])
        self.assertEqual(bytes(self.client.compute("echo", b"1")), b"1")

    def test_a_failure_has_a_class_a_code_and_a_hint(self):
        with self.assertRaises(tf.NotFound) as e:
            self.client.compute("nix", b"1")
        self.assertEqual(e.exception.code, "NOT_FOUND")
        self.assertIn("nix", e.exception.message)
        self.assertTrue(e.exception.hint)
        self.assertRegex(e.exception.call, "^[0-9a-f]{32}$")
        self.assertIn(f"call={e.exception.call!r}", repr(e.exception))
        self.assertFalse(e.exception.retryable)
        with self.assertRaises(tf.FailedPrecondition):
            self.client.compute("affine", b"1")
        with self.assertRaises(tf.Error):
            self.client.pull("nix")
        with self.assertRaises(tf.Error):
            self.client.delete("nix")
        self.assertEqual(bytes(self.client.compute("echo", b"1")), b"1")

    def test_nobody_listens(self):
        with tf.connect("127.0.0.1:1") as c, self.assertRaises(tf.Unavailable) as e:
            c.compute("echo", b"1", timeout=5)
        self.assertTrue(e.exception.retryable)

    def test_a_timeout_ends_the_call(self):
        start = time.monotonic()
        with self.assertRaises(tf.DeadlineExceeded) as e:
            self.client.compute("slow", b"1", params={"delay": "30s"}, timeout=0.2)
        self.assertIsInstance(e.exception, TimeoutError)
        self.assertLess(time.monotonic() - start, 5)

    def test_result_may_be_called_again_after_its_own_timeout(self):
        call = self.client.call("slow", {"x": b"123"}, params={"delay": "300ms"})
        with self.assertRaises(tf.DeadlineExceeded):
            call.result(timeout=0.01)
        self.assertFalse(call.done())
        self.assertEqual(bytes(call.result()["y"]), b"123")
        self.assertTrue(call.done())
        self.assertGreater(call.timings.total, 0.2)

    def test_cancel(self):
        call = self.client.call("slow", {"x": b"1"}, params={"delay": "30s"})
        call.cancel()
        with self.assertRaises(tf.Cancelled):
            call.result(timeout=5)
        with self.client.call("slow", {"x": b"1"}, params={"delay": "30s"}) as call:
            pass
        with self.assertRaises(tf.Cancelled):
            call.result(timeout=5)
        pending = self.client._link.pending
        call = self.client.call("slow", {"x": b"1"}, params={"delay": "30s"})
        del call  # dropping it cancels it
        support.eventually(lambda: self.client.compute("echo", b"1") and not pending)

    def test_ctrl_c_cancels_the_call_and_the_link_goes_on(self):
        before = support.link_pid()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with self.assertRaises(KeyboardInterrupt):
            self.client.compute("slow", b"1", params={"delay": "30s"})
        support.eventually(lambda: self.client.compute("echo", b"1") and not self.client._link.pending)
        self.assertEqual(support.link_pid(), before)

    def test_ctrl_c_shows_no_other_exception(self):
        # The signal comes to another thread: this one goes on when its wait for a message is over.
        code = """if True:
            import signal, sys, threading, time, tensorferry as tf
            c = tf.connect(sys.argv[1])
            def interrupt():
                time.sleep(0.5)
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            threading.Thread(target=interrupt).start()
            c.compute("slow", b"1", params={"delay": "30s"})
        """
        p = subprocess.run(
            [sys.executable, "-c", code, self.server.address],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=20,
        )
        self.assertIn("KeyboardInterrupt", p.stderr)
        self.assertNotIn("another exception", p.stderr)

    def test_a_call_says_what_it_is(self):
        call = self.client.call("slow", {"x": b"1"}, params={"delay": "300ms"})
        self.assertEqual(repr(call), "<tensorferry.Call of slow, running>")
        call.result()
        self.assertEqual(repr(call), "<tensorferry.Call of slow, done>")
        call = self.client.call("nix", {"x": b"1"})
        with self.assertRaises(tf.NotFound) as e:
            call.result()
        self.assertEqual(repr(call), f"<tensorferry.Call of nix, failed: {e.exception!r}>")

    def test_public_names_are_those_of_the_package(self):
        for name in tf.__all__:
            if name not in ("aio", "__version__"):
                self.assertEqual(getattr(tf, name).__module__, "tensorferry", name)
        self.assertEqual(repr(tf.NotFound), "<class 'tensorferry.NotFound'>")
        with self.assertRaises(tf.NotFound) as e:
            self.client.compute("nix", b"1")
        again = pickle.loads(pickle.dumps(e.exception))
        self.assertIs(type(again), tf.NotFound)
        self.assertEqual((again.message, again.call), (e.exception.message, e.exception.call))

    def test_models_have_attributes(self):
        models = {m.name: m for m in self.client.models()}
        affine, sink = models["affine"], models["sink"]
        self.assertEqual(affine.inputs, {"x": tf.Port(("float32", "float16", "bfloat16", "float64"), (-2,))})
        self.assertEqual(affine.params["a"], tf.Param("number", "1", "factor of x"))
        self.assertEqual((affine.rows, sink.rows), ("all", 0))
        self.assertEqual(list(sink.outputs), ["bytes"])
        self.assertRegex(repr(affine), r"^Served\(name='affine', version='1', device='cpu', inputs=\{'x': Port\(")

    @support.needs_torch
    def test_an_input_that_requires_a_gradient_warns_once(self):
        x = support.torch.ones(3, requires_grad=True)
        _client._has_warned = False
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self.client.push({"grad": x})
            with support.torch.no_grad():
                self.client.compute("relu", x)
            self.assertEqual(seen, [])
            for _ in range(3):
                self.client.compute("relu", x)
                self.client.call("relu", {"x": x}).result()
        self.client.delete("grad")
        self.assertEqual(len(seen), 1)
        self.assertRegex(str(seen[0].message), r"none flows through a call; pass x\.detach\(\)")
        self.assertEqual(seen[0].filename, __file__)

    def test_wrong_arguments(self):
        with self.assertRaises(TypeError):
            self.client.empty(3, "float128")
        with self.assertRaises(ValueError):
            self.client.call("echo", {"x": b"1"}, like="jax")
        with self.assertRaises(ValueError):
            self.client.call("echo", {"x": b"1"}, out={"y": b"1"})  # read-only
        with self.assertRaises(ValueError):
            self.client.call("m" * 70_000, {"x": b"1"})
        c = tf.connect(self.server.address)
        c.close()
        c.close()
        with self.assertRaises(ValueError):
            c.compute("echo", b"1")

    def test_what_is_no_mapping_and_no_number_says_so(self):
        class Module:
            def state_dict(self):
                return {}

        for what, does in (
            ("inputs is a bytes", lambda: self.client.call("echo", b"abc")),
            ("params is a list", lambda: self.client.compute("echo", b"abc", params=["a"])),
            ("push_module takes a module", lambda: self.client.push(Module())),
            ("tensors is a bytes", lambda: self.client.push(b"abc")),
            ("out is a bytearray", lambda: self.client.pull("x", out=bytearray(1))),
            ("a model is named by a str", lambda: self.client.compute(None, b"abc")),
            ("write host:port", lambda: tf.connect(50051)),
            ("a name is ['x']; it must be a str", lambda: self.client.pull(["x"])),
            ("a name is ['x']", lambda: self.client.delete(["x"])),
            ("glob is ['x']", lambda: self.client.list(["x"])),
            ("a name in tensors is 3", lambda: self.client.push({3: b"abc"})),
            ("a name in inputs is None", lambda: self.client.call("echo", {None: b"abc"})),
            ("a name in params is 3", lambda: self.client.pull("x", source=True, params={3: 1})),
            ("metadata is a list", lambda: self.client.push({"x": b"abc"}, metadata=["x"])),
            ("metadata['x'] is a str", lambda: self.client.push({"x": b"abc"}, metadata={"x": "a"})),
            ("a value in metadata['x'] is 1", lambda: self.client.push({"x": b"abc"}, metadata={"x": {"a": 1}})),
            ("a value in metadata['x'] is 1", lambda: self.client.call("echo", {"x": b"a"}, metadata={"x": {"a": 1}})),
        ):
            with self.subTest(what), self.assertRaises(TypeError) as e:
                does()
            self.assertIn(what, str(e.exception))
        for does in (
            lambda: self.client.compute("echo", b"abc", timeout=0),
            lambda: self.client.push({"a": b"abc"}, timeout=-1),
            lambda: tf.connect(self.server.address, memory="2GB"),
            lambda: tf.connect(self.server.address, lanes=65),
            lambda: tf.connect(self.server.address, lanes=-1),
            lambda: tf.connect(self.server.address, lanes="none"),
            lambda: tf.connect(self.server.address, lanes=None),
            lambda: tf.connect(self.server.address, wait=-1),
            lambda: tf.connect(self.server.address, wait="1"),
            lambda: tf.connect(self.server.address, retry_for=-1),
            lambda: tf.connect(self.server.address, retry=3),
            lambda: tf.connect(self.server.address, break_after=-1),
            lambda: tf.connect(self.server.address, lanes=True),
        ):
            with self.assertRaises(ValueError):
                does()

    def test_metadata_comes_back(self):
        pushed = self.client.push({"said": b"abc"}, metadata={"said": {"unit": "m/s"}})
        self.assertEqual(pushed[0].evicted, 0)
        self.assertEqual([s.metadata for s in self.client.list("said")], [{"unit": "m/s"}])
        self.client.push({"said": b"abc"})
        self.assertEqual([s.metadata for s in self.client.list("said")], [{}])
        self.client.delete("said")

    def test_metadata_requests(self):
        self.assertIn("echo", [m.name for m in self.client.models()])
        self.assertEqual(self.client.info()["version"], self.client._link.host["version"])
        self.assertIsInstance(list(self.client.sources()), list)


class Formats(support.Served):
    def test_a_file_has_the_format_of_its_ending(self):
        with tempfile.TemporaryDirectory() as d:
            folder = pathlib.Path(d)
            for dtype in _tensor.NAMES[1:]:
                for shape in ((), (3,), (2, 0), (2, 3)) if dtype == "float32" else ((2, 3),):
                    with self.subTest(dtype=dtype, shape=shape):
                        self.check(folder, dtype, shape)

    def check(self, folder, dtype, shape):
        n = _tensor.size_of(_tensor.NUMBERS[dtype], shape)
        data = bytes(i % 2 for i in range(n))
        x = tf.Tensor(data, dtype=dtype, shape=shape)
        self.client.push({"w": x})
        for ending in (".npy", ".safetensors", ".bin"):
            path = folder / f"x{ending}"
            without = {".npy": ("bfloat16", "float8_e4m3fn", "float8_e5m2"), ".safetensors": ("complex128",)}
            if dtype in without.get(ending, ()):
                with self.assertRaisesRegex(tf.InvalidArgument, f"'w': a {ending} file has no {dtype}"):
                    self.client.pull("w", out={"w": path})
                self.assertFalse(path.exists())
                continue
            self.assertEqual(self.client.pull("w", out={"w": path}), {"w": path})
            self.client.call("echo", {"": x}, out={"y": folder / f"y{ending}"}).result()
            if ending == ".bin":
                self.assertEqual(path.read_bytes(), data)
                continue
            for name in (f"x{ending}", f"y{ending}"):
                subprocess.run(
                    [support.program(), "push", f"back={folder / name}", "--server", self.server.address],
                    check=True,
                    capture_output=True,
                )
                stored = self.client.list("back**")[0]
                self.assertEqual((stored.dtype, stored.shape), (dtype, shape))
                self.assertEqual(stored.digest, self.client.list("w")[0].digest)
                self.client.delete("back**")
            path.unlink()


class ComingBack(unittest.TestCase):
    def test_a_server_that_comes_back_is_found(self):
        server = support.Server()
        address = server.address
        with tf.connect(address) as client, tf.connect(address, wait=60) as patient:
            self.assertEqual(bytes(client.compute("echo", b"abc")), b"abc")
            server.kill()
            for _ in range(3):
                with self.assertRaises(tf.Unavailable):
                    client.compute("echo", b"abc")
            found = []
            waiting = threading.Thread(target=lambda: found.append(bytes(patient.compute("echo", b"xyz"))))
            waiting.start()
            server = support.Server(listen=address)
            self.addCleanup(server.stop)
            self.assertEqual(bytes(client.compute("echo", b"abc")), b"abc")
            waiting.join()
            self.assertEqual(found, [b"xyz"])


class Lanes(support.Served):
    def test_large_tensors_go_by_a_lane_unless_there_is_none(self):
        x = pattern(16 * MIB)

        def by_lane():
            return self.client.info()["counters"]["lane_received_bytes_total"]

        with tf.connect(self.server.address, lanes=0) as c:
            for _ in range(3):
                self.assertEqual(bytes(c.compute("echo", x)), x)
        self.assertEqual(by_lane(), 0)
        for options in ({}, {"lanes": 1}, {"lanes": 8}):
            with self.subTest(options), tf.connect(self.server.address, **options) as c:
                before = by_lane()
                for _ in range(100):  # it is opened beside the first call
                    self.assertEqual(bytes(c.compute("echo", x)), x)
                    if by_lane() > before:
                        break
                else:
                    self.fail("nothing went by a lane")


class Results(support.Served):
    def test_out_arrays_files_and_paths(self):
        for n in (0, 5, 3 * MIB + 7):
            x = bytearray(pattern(n))
            with self.subTest(n), tempfile.TemporaryDirectory() as folder:
                into = bytearray(n)
                self.assertIs(self.client.compute("echo", x, out=into), into)
                self.assertEqual(into, x)
                path = pathlib.Path(folder, "y")
                got = self.client.call("echo", {"x": x}, out={"y": path}).result()
                self.assertEqual(got, {"y": path})
                self.assertEqual(path.read_bytes(), x)
                file = io.BytesIO(b"head")
                file.seek(4)
                self.client.call("echo", {"x": x}, out={"y": file}).result()
                self.assertEqual(file.getvalue(), b"head" + x)
                owned = self.client.empty(n, "uint8", like="tensor")
                self.assertIs(self.client.call("echo", {"x": x}, out={"y": owned}).result()["y"], owned)
                self.assertEqual(bytes(owned), x)
                self.client.push({"out": x})
                into = bytearray(n)
                self.client.pull("out", out={"out": into})
                self.assertEqual(into, x)
                self.client.pull("out", out={"out": path})
                self.assertEqual(path.read_bytes(), x)

    def test_out_that_does_not_fit_fails(self):
        with self.assertRaises(tf.InvalidArgument):
            self.client.compute("echo", b"abc", out=bytearray(4))
        x = tf.Tensor(bytes(6), (2, 3), "uint8")
        with self.assertRaisesRegex(tf.InvalidArgument, r"\(2, 3\), out is uint8 \(3, 2\)"):
            self.client.compute("echo", x, out=tf.Tensor(bytearray(6), (3, 2), "uint8"))
        with self.assertRaisesRegex(tf.InvalidArgument, 'there is no result "Y"; the results are .*y'):
            self.client.call("echo", {"": x}, out={"Y": bytearray(6)}).result()
        with self.assertRaisesRegex(TypeError, "call takes a mapping"):
            self.client.compute("echo", x, out={"y": bytearray(6)})
        with self.assertRaises(tf.Error), tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "y")
            try:
                self.client.call("nix", {"x": b"abc"}, out={"y": path}).result()
            finally:
                self.assertEqual(os.listdir(folder), [], "nothing is left of what failed")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "y")
            with open(path, "wb") as file:
                file.write(b"before")
            with self.assertRaises(tf.NotFound):
                self.client.call("nix", {"": b"abc"}, out={"y": path}).result()
            with open(path, "rb") as file:
                self.assertEqual(file.read(), b"before")
            self.client.call("echo", {"": b"abc"}, out={"y": path}).result()
            with open(path, "rb") as file:
                self.assertEqual(file.read(), b"abc")
            self.client.call("slow", {"": b"abc"}, out={"y": path}, params={"delay": "1m"}).cancel()

            def gone():
                self.client.compute("echo", b"abc")  # reads what the program says of the other call
                gc.collect()
                return os.listdir(folder) == ["y"]

            support.eventually(gone)
        self.client.call("echo", {"": b"abc"}, out={"y": os.devnull}).result()

    def test_a_file_that_cannot_be_replaced_is_written_in_place(self):
        def opened(path, *args, **kwargs):  # in a folder that may not be changed
            if str(path).endswith(".tmp"):
                raise PermissionError(errno.EACCES, "refused")
            return open(path, *args, **kwargs)

        busy = mock.patch("os.replace", side_effect=OSError(errno.EBUSY, "busy"))  # a mounted file
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "y")
            with open(path, "wb") as file:
                file.write(b"before, and longer")
            for refused in (contextlib.nullcontext(), mock.patch("tensorferry._run.open", opened, create=True)):
                with busy, refused, self.assertWarnsRegex(UserWarning, "was written in place: busy"):
                    self.client.call("echo", {"": b"abc"}, out={"y": path}).result()
                with open(path, "rb") as file:
                    self.assertEqual(file.read(), b"abc")
                self.assertEqual(os.listdir(folder), ["y"])
            full = mock.patch("shutil.copyfile", side_effect=OSError(errno.ENOSPC, "full"))
            with busy, full, self.assertRaisesRegex(OSError, "full; the whole result is in ") as caught:
                self.client.call("echo", {"": b"xyz"}, out={"y": path}).result()
            with open(caught.exception.strerror.rsplit(" ", 1)[1], "rb") as file:
                self.assertEqual(file.read(), b"xyz")

    def test_a_view_keeps_its_memory(self):
        y = self.client.compute("echo", b"abcdef" * 1000)
        part = y.data[6:12]
        del y
        for _ in range(50):
            self.client.compute("echo", b"x" * 6000)
        self.assertEqual(bytes(part), b"abcdef")

    def test_a_copy_keeps_none(self):
        y = self.client.compute("echo", b"abc", copy=True)
        self.assertIsNone(self.client._link.find(tf._tensor.address_of(y.data), 3))
        y = self.client.compute("echo", b"abc")
        self.assertIsNotNone(self.client._link.find(tf._tensor.address_of(y.data), 3))

    @support.needs_numpy
    def test_a_view_of_a_view_keeps_its_memory(self):
        y = self.client.compute("echo", numpy.arange(6000))
        part = y.reshape(60, 100)[3:5].T
        del y
        gc.collect()
        for _ in range(50):
            self.client.compute("echo", numpy.zeros(6000, "i8"))
        self.assertTrue((part.T.reshape(-1) == numpy.arange(300, 500)).all())

    def test_results_larger_than_the_quota_come_in_pieces(self):
        kept = [self.client.compute("echo", b"1" * 1000)]
        want = pattern(40 * MIB)
        quota = self.client._link.host["memory"]
        hold = []
        try:
            while True:  # fill the quota
                hold.append(_link.drive(self.client._link._take(min(64 * MIB, quota // 4), 0.0)))
        except tf.Error:
            pass
        try:
            while True:
                hold.append(_link.drive(self.client._link._take(4 * MIB, 0.0)))
        except tf.Error:
            pass
        hold[-6:] = []
        self.assertEqual(self.client.compute("echo", want).data, want)
        del hold, kept


class Regions(support.Served):
    def test_regions_cover_the_result(self):
        x = array.array("i", range(2_000_000))
        call = self.client.call("echo", {"x": x})
        seen = bytearray(8_000_000)
        for r in call.regions():
            self.assertEqual(r.port, "y")
            seen[r.offset : r.offset + r.length] = r.data
            self.assertLessEqual(r.rows.stop * 4, r.offset + r.length)
        self.assertEqual(seen, bytes(x))
        self.assertEqual(bytes(call.result()["y"]), bytes(x))

    def test_results_come_while_inputs_are_made(self):
        made, seen = [], []

        def items():
            for i in range(24):
                made.append(i)
                time.sleep(0.01)
                yield bytes([i]) * MIB

        call = self.client.call("echo", {"x": tf.Stream(items(), (24, MIB), "uint8")}, like="tensor")
        for r in call.regions():
            seen.append((len(made), r.offset))
        self.assertLess(seen[0][0], 24, "the first region came before the last item was made")
        self.assertEqual(bytes(call.result()["y"]), b"".join(bytes([i]) * MIB for i in range(24)))

    def test_an_item_goes_when_it_is_made(self):
        def echo(size):
            rows = [pattern(size, i) for i in range(6)]

            def came(n):
                return call.done() or sum(r.arrived for r in call._run.results.values()) >= n

            def items():
                for i, row in enumerate(rows):
                    support.eventually(functools.partial(came, i * size))
                    yield row

            call = self.client.call("echo", {"x": tf.Stream(items(), (6, size), "uint8")}, like="tensor", timeout=30)
            self.assertEqual(bytes(call.result()["y"]), b"".join(rows))

        for size in (1, 3, 1000, 64 << 10, MIB - 1, MIB, MIB + 8, 3 * MIB):
            echo(size)

    @support.needs_numpy
    def test_rows_that_are_made_take_no_more_memory_than_all_of_them(self):
        import numpy as np

        x = np.arange(512 * 768, dtype="float32").reshape(512, 768)
        step = [1, 1, 200, 7, 300, 3]  # strided ones are copied as one, and may be cut
        ends = np.cumsum(step)
        for rows in (x, np.asfortranarray(x)):
            items = (rows[e - n : e] for n, e in zip(step, ends))
            call = self.client.call("echo", {"x": tf.Stream(items, x.shape, "float32")})
            self.assertLessEqual(sum(r.length for feed in call._run.feeds for r in feed._spare), 2 * MIB)
            np.testing.assert_array_equal(call.result()["y"], x)

    def test_items_that_wait_for_their_own_result_are_told_so(self):
        def items():
            yield b"1"
            call.result()

        call = self.client.call("echo", {"x": tf.Stream(items(), (8,), "uint8")})
        with self.assertRaisesRegex(RuntimeError, "items of a Stream wait for a result of their own call.*aio"):
            call.result()
        self.assertEqual(bytes(self.client.compute("echo", b"1")), b"1")

    def test_streams_of_any_cut(self):
        want = pattern(5 * MIB + 3)
        for step in (9973, 999_983, MIB, 3 * MIB, 6 * MIB):
            s = tf.Stream((want[i : i + step] for i in range(0, len(want), step)), (len(want),), "uint8")
            self.assertEqual(bytes(self.client.call("echo", {"x": s}, like="tensor").result()["y"]), want)
            s = tf.Stream((want[i : i + step] for i in range(0, len(want), step)), (len(want),), "uint8")
            self.client.push({"s": s})
            self.assertEqual(bytes(self.client.pull("s", like="tensor")["s"]), want)

    def test_what_has_no_bytes_goes_beside_a_stream(self):
        def stream(*items):
            return tf.Stream(items, (sum(map(len, items)),), "uint8")

        empty = tf.Tensor(b"", (0, 5), "float32")
        for order in ("esz", "sez", "zse"):
            tensors = {"e": empty, "s": stream(b"", pattern(3 * MIB), b"1", b""), "z": stream(b"")}
            self.client.push({name: tensors[name] for name in order})
            back = self.client.pull("e", "s", "z", like="tensor")
            self.assertEqual(back["e"].shape, (0, 5))
            self.assertEqual(bytes(back["s"]), pattern(3 * MIB) + b"1")
            self.assertEqual(bytes(back["z"]), b"")
        with self.assertRaisesRegex(ValueError, "a Stream of 1 bytes has more"):
            self.client.push({"e": empty, "s": tf.Stream([b"1", b"", b"2"], (1,), "uint8")})

    def test_a_generator_may_rest_for_longer_than_a_server_waits_for_the_dead(self):
        server = support.Server("--chunk-idle", "1s")
        self.addCleanup(server.stop)
        with tf.connect(server.address) as client:

            def age():
                return client.info()["uptime_millis"]

            def halting():
                yield b"1" * MIB
                rested = age() + 3000
                support.eventually(lambda: age() >= rested, 60)
                yield b"2" * MIB

            want = b"1" * MIB + b"2" * MIB
            call = client.call("echo", {"x": tf.Stream(halting(), (2 * MIB,), "uint8")}, like="tensor")
            client.push({"s": tf.Stream(halting(), (2 * MIB,), "uint8")})
            self.assertEqual(bytes(call.result()["y"]), want)
            self.assertEqual(bytes(client.pull("s", like="tensor")["s"]), want)

    def test_a_stream_that_breaks_its_word_fails(self):
        for items in ([b"1"] * 3, [b"1" * 9], [b"1"] * 9):
            with self.assertRaises(ValueError):
                self.client.call("echo", {"x": tf.Stream(items, (8,), "uint8")}).result()

        def broken():
            yield b"1" * MIB
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            self.client.call("echo", {"x": tf.Stream(broken(), (4 * MIB,), "uint8")}).result()
        self.assertEqual(bytes(self.client.compute("echo", b"1")), b"1")

    def test_progress(self):
        seen = []
        x = pattern(5 * MIB)
        call = self.client.call("echo", {"x": x}, progress=lambda *a: seen.append(a))
        call.result()
        self.assertIn(("x", 5 * MIB, 5 * MIB), seen)
        self.assertIn(("y", 5 * MIB, 5 * MIB), seen)
        for verb in (
            lambda show: self.client.push({"p": x}, progress=show),
            lambda show: self.client.pull("p", progress=show),
        ):
            seen.clear()
            verb(lambda *a: seen.append(a))
            self.assertEqual(seen[-1], ("p", 5 * MIB, 5 * MIB))

    @support.needs_numpy
    def test_memmaps(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(pattern(12 * MIB))
            file.flush()
            m = numpy.memmap(file.name, "i4", "r", shape=(3, MIB))
            self.assertTrue((self.client.compute("echo", m) == m).all())
            into = numpy.memmap(file.name, "i4", "r+", shape=(3, MIB))
            self.client.compute("relu", numpy.asarray(m, "f4"), out=None)
            self.client.compute("echo", numpy.zeros((3, MIB), "i4"), out=into)
            self.assertFalse(m.any())


@support.needs_torch
class Modules(support.Served):
    def module(self):
        nn = support.torch.nn
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8))
        net[4].weight = net[3].weight  # tied
        net[0].weight = nn.Parameter(net[0].weight.detach().permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3))
        net.register_buffer("turned", support.torch.randn(6, 4).t())
        return net

    def test_a_module_comes_back(self):
        torch = support.torch
        net, other = self.module(), self.module()
        net[1].num_batches_tracked += 7
        self.assertFalse(net[0].weight.is_contiguous())
        for prefix in ("", "net/", "odd[*]?/"):
            names = {p.name for p in self.client.push_module(net, prefix)}
            self.assertEqual(names, {prefix + name for name in net.state_dict()})
            with torch.no_grad():
                for x in other.state_dict().values():
                    x.zero_()
            places = {name: x.data_ptr() for name, x in other.state_dict().items()}
            self.assertIsNone(self.client.load_into(other, prefix))
            self.assertEqual({name: x.data_ptr() for name, x in other.state_dict().items()}, places)
            for name, x in net.state_dict().items():
                self.assertTrue(torch.equal(x, other.state_dict()[name]), name)
            self.assertIs(other[4].weight, other[3].weight)
            self.assertTrue(other[3].weight.requires_grad)
            self.client.delete("**")

    def test_a_prefix_is_a_folder(self):
        net, other = support.torch.nn.Linear(2, 3), support.torch.nn.Linear(2, 3)
        self.assertEqual({p.name for p in self.client.push_module(net, "net")}, {"net/weight", "net/bias"})
        for prefix in ("net", "net/"):
            support.torch.nn.init.zeros_(other.weight)
            self.client.load_into(other, prefix)
            self.assertTrue(support.torch.equal(other.weight, net.weight))
        self.client.delete("**")

    def test_a_module_of_more_tensors_than_a_message_names_comes_back(self):
        torch = support.torch
        net, other = (
            torch.nn.ParameterList([torch.nn.Parameter(torch.full((1,), k + i)) for i in range(1025)])
            for k in (0.0, 5.0)
        )
        self.client.push_module(net, "many/")
        self.client.load_into(other, "many/")
        self.assertEqual([float(p) for p in other], [float(p) for p in net])
        names = sorted("many/" + name for name in net.state_dict())
        self.assertEqual(sorted(self.client.delete(*names)), names)

    def test_a_store_that_does_not_fit_changes_nothing(self):
        torch = support.torch
        net = self.module()
        self.client.push_module(net, "m/")
        self.client.push({"m/0.bias": torch.zeros(5), "m/turned": torch.zeros(4, 6, dtype=torch.float64)})
        self.client.delete("m/3.bias")
        before = {name: x.clone() for name, x in net.state_dict().items()}
        with torch.no_grad():
            for x in self.client.pull("m/*", like="torch").values():
                x.zero_()
        with self.assertRaises(ValueError) as e:
            self.client.load_into(net, "m/")
        for part in (
            "'m/3.bias' is missing",
            "'m/0.bias' is float32 (5,), the module has float32 (4,)",
            "'m/turned' is float64 (4, 6), the module has float32 (4, 6)",
        ):
            self.assertIn(part, str(e.exception))
        for name, x in net.state_dict().items():
            self.assertTrue(torch.equal(x, before[name]), name)
        with self.assertRaisesRegex(ValueError, "'n/1.weight' is missing; .*; and 7 more"):
            self.client.load_into(net, "n/")
        with self.assertRaisesRegex(TypeError, "a dict is not a torch module"):
            self.client.load_into({})
        self.client.delete("**")


class Together(support.Served):
    def test_many_calls_from_one_thread(self):
        xs = [pattern(n, n) for n in (0, 1, 30_000, MIB, MIB + 1, 5 * MIB) for _ in range(5)]
        calls = [self.client.call("echo", {"x": x}) for x in xs]
        for x, call in reversed(list(zip(xs, calls))):
            self.assertEqual(call.result(timeout=30)["y"].data, x)

    def test_many_threads_share_a_client(self):
        wrong = []

        def work(i):
            try:
                for k in range(60):
                    x = pattern((i * 7919 + k * 104_729) % (MIB // 2 if k % 20 else 3 * MIB) + 1, i)
                    if bytes(self.client.compute("echo", x, timeout=30)) != x:
                        raise AssertionError("another's bytes")
            except BaseException as err:
                wrong.append(err)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertEqual(wrong, [])
        self.assertFalse(any(t.is_alive() for t in threads))
        self.assertFalse(self.client._link.pending)

    def test_a_thread_that_waits_longer_does_not_hold_up_others(self):
        slow = threading.Thread(
            target=lambda: self.client.compute("slow", b"1", params={"delay": "1s"}),
        )
        slow.start()
        time.sleep(0.1)
        start = time.monotonic()
        for _ in range(10):
            self.client.compute("echo", b"1")
        self.assertLess(time.monotonic() - start, 0.8)
        slow.join()


class Finds(unittest.TestCase):
    def command(self, script, *args, **env):
        """Run the command, or a script, with the package of this test."""
        return subprocess.run(
            [*script, *args], capture_output=True, text=True, timeout=30, check=False,
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(tf.__file__).parents[1]), **env},
        )  # fmt: skip

    def test_the_packages_own_command_is_not_taken_for_the_program(self):
        program = support.program()
        with tempfile.TemporaryDirectory() as folder:

            def script(name, text):
                path = pathlib.Path(folder, name)
                path.write_text(text)
                path.chmod(0o755)
                return str(path)

            os.mkdir(f"{folder}/real")
            os.symlink(program, f"{folder}/real/tensorferry")
            own = script("tensorferry", f"#!{sys.executable}\nfrom tensorferry._program import main\nmain()\n")
            found = self.command([own], "version", TENSORFERRY_BIN=own, PATH=f"{folder}:{folder}/real")
            self.assertEqual((found.returncode, found.stderr), (0, ""))
            code = "import tensorferry._program as p; print(p.find() != p.os.environ['TENSORFERRY_BIN'])"
            found = self.command([sys.executable, "-c", code], TENSORFERRY_BIN=own, PATH=f"{folder}:{folder}/real")
            self.assertEqual(found.stdout, "True\n")
            wrapper = script("wrapper", f'#!/bin/sh\nexec {own} "$@"\n')
            failed = self.command([own], "version", TENSORFERRY_BIN=wrapper)
            self.assertRegex(failed.stderr, "wrapper' starts this command again; set TENSORFERRY_BIN to the program")

    def test_the_command_need_not_be_on_the_path(self):
        said = self.command(
            [sys.executable, "-m", "tensorferry"], "version", TENSORFERRY_BIN=support.program(), PATH=""
        )
        self.assertEqual((said.returncode, said.stderr), (0, ""))
        self.assertTrue(said.stdout.strip())


class Ends(unittest.TestCase):
    def test_the_server_is_killed_and_restarted(self):
        server = support.Server()
        with tf.connect(server.address) as c:
            self.assertEqual(bytes(c.compute("echo", b"1")), b"1")
            call = c.call("slow", {"x": b"1"}, params={"delay": "30s"})
            server.kill()
            with self.assertRaises(tf.Error) as e:
                call.result(timeout=20)
            self.assertTrue(e.exception.retryable)
            server = support.Server(listen=server.address)
            self.addCleanup(server.stop)

            def works():
                try:
                    return bytes(c.compute("echo", b"2", timeout=5)) == b"2"
                except tf.Unavailable:
                    return False

            support.eventually(works)

    def test_the_program_is_killed(self):
        server = support.Server()
        self.addCleanup(server.stop)
        with tf.connect(server.address) as c:
            kept = c.compute("echo", b"kept" * 1000)
            call = c.call("slow", {"x": b"1"}, params={"delay": "30s"})
            os.kill(support.link_pid(), signal.SIGKILL)
            with self.assertRaises(tf.LinkError) as e:
                call.result(timeout=20)
            self.assertTrue(e.exception.retryable)
            self.assertEqual(bytes(c.compute("echo", b"2")), b"2")
            self.assertEqual(bytes(kept), b"kept" * 1000)
            self.assertEqual(bytes(c.compute("echo", kept)), b"kept" * 1000)  # of the link before

    def test_a_program_of_another_version_is_refused(self):
        server = support.Server()
        self.addCleanup(server.stop)
        _link._stop()
        said, _link.PROGRAM_VERSION = _link.PROGRAM_VERSION, "9.9.9"
        try:
            with self.assertRaises(tf.LinkError) as e:
                tf.connect(server.address)
            self.assertIn("9.9.9", str(e.exception))
            self.assertIn(said, str(e.exception))
        finally:
            _link.PROGRAM_VERSION = said
        with tf.connect(server.address) as c:
            self.assertEqual(bytes(c.compute("echo", b"2")), b"2")

    def test_a_host_that_breaks_the_protocol_ends_the_link(self):
        server = support.Server()
        self.addCleanup(server.stop)
        with tf.connect(server.address) as c:
            link = c._link
            bad = bytearray(_wire.encode(_wire.MEMORY, 99, bytes=1))  # without a descriptor
            real, link._sock = link._sock, _Says(bad)
            try:
                with self.assertRaises(tf.LinkError) as e:
                    c.compute("echo", b"1")
            finally:
                link._sock = real
            self.assertIn("protocol", str(e.exception))
            self.assertEqual(bytes(c.compute("echo", b"2")), b"2")


class _Says:
    def __init__(self, packet):
        self.packet = packet

    def recvmsg_into(self, into, _, flags):
        into[0][: len(self.packet)] = self.packet
        return len(self.packet), [], 0, None

    def shutdown(self, _):
        pass


if __name__ == "__main__":
    unittest.main()
