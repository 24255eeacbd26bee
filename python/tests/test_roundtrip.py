"""Every data type and kind of shape, there and back, bit by bit."""

import array
import ctypes
import math
import mmap
import unittest

import support
import tensorferry as tf
from support import ml_dtypes, numpy, pattern, torch
from tensorferry import _tensor

NAMES = _tensor.NAMES[1:]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7, 13), (2, 3, 5, 7), (300_001,)]
LARGE = (9, 1 << 20)


def raw(name, shape):
    data = pattern(_tensor.size_of(_tensor.NUMBERS[name], shape))
    return bytes(b & 1 for b in data) if name == "bool" else data


class Plain(support.Served):
    def test_every_data_type_and_shape(self):
        for name in NAMES:
            for shape in SHAPES:
                with self.subTest(name, shape=shape):
                    x = tf.Tensor(raw(name, shape), shape, name)
                    y = self.client.compute(self.model, x)
                    self.assertEqual((y.dtype, y.shape, bytes(y)), (x.dtype, x.shape, bytes(x)))

    def test_a_large_tensor(self):
        x = tf.Tensor(raw("uint8", LARGE), LARGE, "uint8")
        self.assertEqual(self.client.compute(self.model, x).data, x.data)

    def test_buffers_of_the_standard_library(self):
        for x in (b"abc", bytearray(b"abc"), memoryview(b"abc"), array.array("d", [1, 2, 3]), array.array("l", [])):
            y = self.client.compute(self.model, x)
            self.assertIsInstance(y, tf.Tensor)
            self.assertEqual(bytes(y), bytes(memoryview(x)))
        self.assertEqual(self.client.compute(self.model, array.array("d", [1, 2.5])).tolist(), [1, 2.5])
        self.assertEqual(self.client.compute("relu", array.array("f", [-1, 2])).tolist(), [0, 2])

    def test_push_and_pull(self):
        tensors = {
            f"p/{name}/{i}": tf.Tensor(raw(name, s), s, name) for name in NAMES for i, s in enumerate(SHAPES[:5])
        }
        tensors["p/large"] = tf.Tensor(raw("int16", (5, 1 << 20)), (5, 1 << 20), "int16")
        pushed = self.client.push(tensors)
        self.assertEqual([(p.name, p.bytes) for p in pushed], [(n, t.nbytes) for n, t in tensors.items()])
        got = self.client.pull("p/*/*", "p/large", like="tensor")
        self.assertEqual(set(got), set(tensors))
        for name, x in tensors.items():
            y = got[name]
            self.assertEqual((y.dtype, y.shape, y.data), (x.dtype, x.shape, x.data), name)
        listed = {s.name: s for s in self.client.list("p/*")}
        self.assertEqual(listed["p/large"].shape, (5, 1 << 20))
        self.assertEqual(listed["p/large"].digest, pushed[-1].digest)
        self.assertEqual(len(self.client.delete("p/*/*", "p/large")), len(tensors))
        self.assertFalse([s.name for s in self.client.list() if s.name.startswith("p/")])

    def test_a_set_is_pushed_together(self):
        names = {f"set/{i}": tf.Tensor(raw("int8", (i,)), (i,), "int8") for i in range(20)}
        self.assertEqual(len(self.client.push(names, all=True)), len(names))
        self.assertEqual(len(self.client.pull("set/*", like="tensor")), len(names))
        with self.assertRaises(tf.Error):
            self.client.push({"set/0": names["set/5"], "set/new": names["set/6"], "": names["set/7"]}, all=True)
        got = self.client.pull("set/*", like="tensor")
        self.assertEqual((len(got), got["set/0"].shape), (len(names), (0,)))
        self.client.delete("set/*")

    def test_memory_of_the_link_is_sent_as_it_is(self):
        e = self.client.empty((3, 1 << 20), "uint8", like="tensor")
        e.data[:] = raw("uint8", e.shape)
        self.assertEqual(self.client.compute(self.model, e).data, e.data)
        y = self.client.compute(self.model, tf.Tensor(e.data[100:5100]))  # a part of it
        self.assertEqual(bytes(y), bytes(e.data[100:5100]))
        self.client.push({"owned": e})
        self.assertEqual(self.client.pull("owned", like="tensor")["owned"].data, e.data)
        self.client.delete("owned")

    def test_what_is_not_a_tensor_says_so(self):
        for x in (1.5, [1, 2], "abc", None, object()):
            with self.assertRaises(TypeError):
                self.client.compute(self.model, x)
        with self.assertRaises(TypeError):
            tf.Tensor(b"abc", dtype="float128")
        with self.assertRaises(ValueError):
            tf.Tensor(b"abc", (2, 2), "uint8")
        with self.assertRaises(ValueError):
            tf.Tensor(b"abc", (-1,), "uint8")


@support.needs_numpy
class Numpy(support.Served):
    def same(self, x, y, want=None):
        want = x if want is None else want
        self.assertIsInstance(y, numpy.ndarray)
        self.assertEqual((y.shape, y.dtype), (x.shape, want.dtype))
        self.assertEqual(y.tobytes(), want.tobytes())
        self.assertTrue(y.flags.writeable and y.flags.c_contiguous)

    def test_every_data_type_and_shape(self):
        for name in NAMES:
            for shape in [*SHAPES, (3, 1 << 20)]:
                with self.subTest(name, shape=shape):
                    number = _tensor.NUMBERS[name]
                    data = raw(name, shape)
                    if number in _tensor._BITS:
                        bits = numpy.frombuffer(data, _tensor._BITS[number]).reshape(shape)
                        self.same(
                            bits,
                            self.client.call(self.model, {"": tf.Tensor(bits, dtype=name)}, like="numpy")
                            .result()["y"]
                            .view(bits.dtype),
                        )
                    else:
                        x = numpy.frombuffer(data, name).reshape(shape)  # read-only
                        self.same(x, self.client.compute(self.model, x))

    def test_layouts_that_need_a_copy(self):
        base = numpy.frombuffer(pattern(8 * 3 * 5 * 7 * 4), "<f8").reshape(3, 5, 7, 4)
        large = numpy.frombuffer(pattern(4 * 2100 * 1500), "<i4").reshape(2100, 1500)
        long = numpy.frombuffer(pattern(4 << 20), "u1").reshape(2, 2 << 20)
        cases = {
            "strided": base[::2, 1::3, ::-1], "fortran": numpy.asfortranarray(base), "transposed": base.T,
            "big-endian": base.astype(">f8"), "big-endian-0d": numpy.array(1.5, ">f4"), "broadcast": numpy.broadcast_to(base[0], base.shape),
            "large-strided": large[:, ::2], "large-fortran": numpy.asfortranarray(large), "large-transposed": large.T,
            "large-big-endian": large.astype(">i4"), "long-rows": long[:, ::-1], "wide": numpy.broadcast_to(base[0, 0, 0, :1], (3_000_000,)),
            "negative": base[::-1], "empty-strided": base[:0, ::2],
        }  # fmt: skip
        for name, x in cases.items():
            with self.subTest(name):
                want = numpy.ascontiguousarray(x, x.dtype.newbyteorder("=")).reshape(x.shape)
                self.same(x, self.client.compute(self.model, x), want)
                self.client.push({"layout": x})
                self.same(x, self.client.pull("layout")["layout"], want)

    def test_scalars_and_subclasses(self):
        self.same(numpy.asarray(numpy.float32(2)), self.client.compute(self.model, numpy.float32(2)))
        with self.assertRaises(TypeError):
            self.client.compute(self.model, numpy.ma.masked_array([1.0], [True]))
        for x in (
            numpy.array(["a"]),
            numpy.array([object()]),
            numpy.zeros(2, "M8[s]"),
            numpy.zeros(2, "f4,i4"),
            numpy.zeros(2, "g"),
        ):
            with self.assertRaises(TypeError, msg=x.dtype):
                self.client.compute(self.model, x)

    @support.needs_ml_dtypes
    def test_ml_dtypes(self):
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            x = numpy.arange(1000).astype(getattr(ml_dtypes, name)).reshape(10, 100)
            self.same(x, self.client.compute(self.model, x))
            self.same(x[:, ::3], self.client.compute(self.model, x[:, ::3]))

    def test_bits_where_numpy_has_no_type(self):
        bits = numpy.arange(1000, dtype="u2")
        y = self.client.compute("relu", tf.Tensor(bits, dtype="bfloat16"))
        self.assertEqual(y.dtype, "bfloat16")
        self.assertEqual(y.numpy().itemsize, 2)

    def test_dlpack(self):
        class Other:
            def __init__(self, x):
                self.x = x

            def __dlpack__(self, **kw):
                return self.x.__dlpack__(**kw)

            def __dlpack_device__(self):
                return self.x.__dlpack_device__()

        x = numpy.arange(12, dtype="f4").reshape(3, 4)
        self.same(x, self.client.compute(self.model, Other(x)))


@support.needs_torch
class Torch(support.Served):
    def same(self, x, y):
        self.assertIsInstance(y, torch.Tensor)
        self.assertEqual((y.shape, y.dtype, y.device), (x.shape, x.dtype, x.device))
        want = x.detach().resolve_conj().contiguous()
        self.assertTrue(
            torch.equal(y.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))
            if math.prod(x.shape)
            else True
        )

    def test_every_data_type_and_shape(self):
        for name in NAMES:
            kind = getattr(torch, name, None)
            for shape in [*SHAPES, (3, 1 << 20)]:
                with self.subTest(name, shape=shape):
                    data = bytearray(raw(name, shape))
                    if kind is None:
                        y = self.client.call(self.model, {"": tf.Tensor(data, shape, name)}, like="torch").result()["y"]
                        self.assertIsInstance(y, tf.Tensor)
                        self.assertEqual(bytes(y), bytes(data))
                        with self.assertRaises(TypeError):
                            y.torch()
                    else:
                        x = torch.frombuffer(data, dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)
                        self.same(x, self.client.compute(self.model, x))

    def test_layouts_that_need_a_copy(self):
        base = torch.arange(3 * 5 * 7, dtype=torch.float64).view(3, 5, 7)
        large = torch.arange(2100 * 1500, dtype=torch.int32).view(2100, 1500)
        cases = {
            "strided": base[:, ::2], "transposed": base.permute(2, 0, 1), "expanded": base[:1].expand(4, 5, 7), "grad": base.clone().requires_grad_(),
            "grad-strided": base.clone().requires_grad_()[:, 1:], "conj": torch.complex(base, base).conj(), "large-transposed": large.t(), "large-strided": large[:, ::2],
            "parameter": torch.nn.Parameter(base.clone()),
        }  # fmt: skip
        for name, x in cases.items():
            with self.subTest(name):
                self.same(x, self.client.compute(self.model, x))

    def test_in_place_operations_on_results_and_owned_inputs(self):
        e = self.client.empty((1000, 1000), "float32", like="torch")
        e.normal_()
        want = e.clone()
        y = self.client.compute(self.model, e)
        e.zero_()
        self.same(want, y)
        y.relu_().mul_(2)
        again = self.client.compute(self.model, y)
        y.zero_()
        self.assertTrue(torch.equal(again, want.relu() * 2))

    def test_push_and_pull(self):
        x = torch.arange(1 << 20).view(1024, 1024)
        self.client.push({"t": x.t(), "u": x.to(torch.bfloat16)})
        got = self.client.pull("t", "u", like="torch")
        self.same(x.t(), got["t"])
        self.same(x.to(torch.bfloat16), got["u"])

    def test_sparse_says_so(self):
        with self.assertRaises(TypeError):
            self.client.compute(self.model, torch.eye(3).to_sparse())


@support.needs_numpy
class Gone(support.Served):
    def test_memory_that_is_not_there_is_refused(self):
        closed, grown = mmap.mmap(-1, 4096), bytearray(8)
        gone = [
            numpy.ndarray((8,), "u1", closed),
            numpy.ndarray((8,), "u1", grown),
            (ctypes.c_ubyte * 8).from_address(0),
        ]
        closed.close()
        grown.extend(bytes(1 << 20))
        gone.append(gone[0][::2])
        if support.torch is not None:
            freed = support.torch.ones(100, 2)
            gone += [freed, freed[5:], freed.t(), support.torch.ones(3, device="meta")]
            (freed.untyped_storage() if hasattr(freed, "untyped_storage") else freed.storage()).resize_(0)
        for x in gone:
            for refused in (
                lambda x: self.client.call("echo", {"w": x}),
                lambda x: self.client.push({"w": x}),
                lambda x: self.client.call("echo", {"x": numpy.ones(8)}, out={"w": x}).result(),
            ):
                with self.subTest(type(x)), self.assertRaisesRegex(TypeError, "w.*: .*(memory was freed|on meta)"):
                    refused(x)
        self.assertTrue((self.client.compute("echo", numpy.ones((8, 8))[1:, ::2]) == 1).all())


class Worker:
    """The same through a model in Python."""

    model = "mirror"
    options = ("--python", "mirror=mirror:echo")


class PlainWorker(Worker, Plain):
    pass


@support.needs_numpy
class NumpyWorker(Worker, Numpy):
    pass


@support.needs_torch
class TorchWorker(Worker, Torch):
    pass


if __name__ == "__main__":
    unittest.main()
