"""A server that wants to know its clients: what is refused says which side to mend."""

from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile
import unittest
from typing import Any
from unittest import mock

import support
import tensorferry as tf

TOKEN = "0123456789abcdef0123456789abcdef"


class TLS(unittest.TestCase):
    folder: pathlib.Path
    server: support.Server

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        subprocess.run(
            [support.program(), "cert", cls.folder, "--client", "alice"], check=True, stdout=subprocess.DEVNULL
        )
        (cls.folder / "token").write_text(TOKEN)
        (cls.folder / "wrong").write_text(TOKEN[::-1])
        files = {
            "--tls-cert": "server.pem",
            "--tls-key": "server-key.pem",
            "--tls-client-ca": "ca.pem",
            "--token-file": "token",
        }
        cls.server = support.Server(*(word for flag, file in files.items() for word in (flag, str(cls.folder / file))))
        cls.addClassCleanup(cls.server.kill)

    def ask(self, **identity: Any) -> int:
        with tf.connect(self.server.address, **identity) as c:
            return len(c.models())

    def test_who_is_known_is_served(self) -> None:
        at = self.folder
        self.assertTrue(self.ask(ca=at / "ca.pem", token=str(at / "token")))
        self.assertTrue(self.ask(ca=at / "ca.pem", cert=at / "alice.pem", key=at / "alice-key.pem"))
        with mock.patch.dict(
            os.environ, {"TENSORFERRY_CA": str(at / "ca.pem"), "TENSORFERRY_TOKEN": str(at / "token")}
        ):
            self.assertTrue(self.ask())

    def test_nobody_else_is_and_learns_why(self) -> None:
        at = self.folder
        for identity, text in (
            ({}, "the server speaks TLS only"),
            ({"ca": at / "ca.pem"}, "the server wants a client certificate, or a token"),
            ({"ca": at / "ca.pem", "token": at / "wrong"}, "does not know the token"),
            ({"tls": True, "token": at / "token"}, "it is not signed by an authority that this system trusts"),
            ({"ca": at / "ca.pem", "server_name": "other.example"}, "not for other.example"),
        ):
            with self.subTest(text), self.assertRaises(tf.Error) as caught:
                self.ask(**identity)
            self.assertIn(text, str(caught.exception))
            self.assertEqual(caught.exception.code, "UNAUTHENTICATED")
        with self.assertRaisesRegex(tf.Error, "nothere.pem: no such file"):
            self.ask(ca="nothere.pem")


if __name__ == "__main__":
    unittest.main()
