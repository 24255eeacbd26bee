"""Messages of docs/link.md, as both sides of the link have them in testdata/vectors/link."""

import json
import random
import unittest

import support
from tensorferry import _wire

FOLDER = support.ROOT / "testdata" / "vectors" / "link"


def read(path):
    lines = dict(line.split(": ", 1) for line in path.read_text().splitlines() if ": " in line)
    return json.loads(lines["json"]), bytes.fromhex(lines["hex"])


@unittest.skipUnless(FOLDER.is_dir(), f"{FOLDER} is only in the repository")
class Vectors(unittest.TestCase):
    def each(self):
        paths = sorted(FOLDER.glob("*.txt"))
        self.assertTrue(paths)
        for path in paths:
            with self.subTest(path.stem):
                yield read(path)

    def test_what_go_writes_is_read_and_written_again(self):
        kinds = set()
        for said, packet in self.each():
            got = _wire.decode(packet)
            kinds.add(got["kind"])
            want = {"flags": 0, "id": 0, **said}
            if "json" in got:
                self.assertEqual(_wire.any_json(got["json"]), want.pop("json", {}))
            plain = json.loads(json.dumps({k: v for k, v in got.items() if k not in ("kind", "json")}))
            self.assertEqual(plain, want)
            fields = {k: v for k, v in got.items() if k not in ("kind", "flags", "id")}
            self.assertEqual(_wire.encode(got["kind"], got["id"], got["flags"], **fields), packet)
        self.assertEqual(kinds, set(_wire._BODIES), "every kind has a vector")

    def test_the_short_ways_agree_with_the_table(self):
        for _, packet in self.each():
            got = _wire.decode(packet)
            kind, id, flags = got["kind"], got["id"], got["flags"]
            if kind == _wire.DONE:
                self.assertEqual(_wire.unpack_done(packet, len(packet))[::3], (got["code"], got["json"]))
            elif kind == _wire.RESULT:
                want = (got["result"], got["name"], got["dtype"], tuple(got["shape"]), got["how"], got["range"])
                self.assertEqual(_wire.unpack_result(packet, len(packet)), want)
            elif kind == _wire.REGION:
                want = (got["result"], got["offset"], got["length"], got["range"])
                self.assertEqual(_wire.unpack_region(packet, len(packet)), want)
            elif kind == _wire.TAKE:
                self.assertEqual(_wire.pack_take(id, got["bytes"], got["millis"]), packet)
            elif kind == _wire.GIVE and id == 0:
                self.assertEqual(_wire.pack_give(got["ranges"]), packet)
            elif kind == _wire.DATA:
                self.assertEqual(_wire.pack_data(id, got["input"], *got["range"]), packet)
            elif kind == _wire.CANCEL:
                self.assertEqual(_wire.pack_cancel(id), packet)
            elif kind == _wire.CALL:
                self.assertEqual(_wire.pack_call(id, flags, got["connection"], got["millis"], packet[24:]), packet)

    def test_what_is_cut_short_is_refused(self):
        for _, packet in self.each():
            for n in range(len(packet)):
                with self.assertRaises(_wire.WireError):
                    _wire.decode(packet[:n])
                # And with a head that says so.
                if n >= 16 and b"json" not in packet and not {"json"} & {f for f, _ in _wire._BODIES[packet[0]]}:
                    cut = bytearray(packet[:n])
                    cut[4:8] = n.to_bytes(4, "little")
                    with self.assertRaises(_wire.WireError):
                        _wire.decode(cut)

    def test_damaged_messages_raise_nothing_else(self):
        draw = random.Random(1)
        for _, packet in self.each():
            for _ in range(200):
                bad = bytearray(packet)
                bad[draw.randrange(len(bad))] = draw.randrange(256)
                for read in (
                    _wire.decode,
                    lambda p: _wire.unpack_result(p, len(p)),
                    lambda p: _wire.unpack_done(p, len(p)),
                    lambda p: _wire.unpack_region(p, len(p)),
                ):
                    try:
                        read(bad)
                    except _wire.WireError:
                        pass


if __name__ == "__main__":
    unittest.main()
