"""Serves a model of this process: a tensorferry server is started as a child, and this process computes for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Optional

from . import _program
from ._errors import LinkError
from ._worker import Worker, load

STOP_SECONDS = 30.0  # the server lets open calls finish for ten


class Server:
    """A server of one model of this process. It ends with close, with the `with` block, or with this process."""

    def __init__(
        self, model: Any, listen: str, name: str, options: Sequence[str], training: dict[str, Any],
        declarations: dict[str, Any],
    ) -> None:  # fmt: skip
        self._stopping = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A session of its own: Ctrl-C is for Python, which has the server finish its calls.
            self._process = subprocess.Popen(
                [
                    _program.find(), "serve", "--child", "--listen", listen,
                    "--python-fd", f"{name}={theirs.fileno()}", *options,
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                pass_fds=[theirs.fileno()], env=_program.environment(),
            )  # fmt: skip
        # Its log goes on to stderr; the end of it says why a server did not start.
        self._last: deque[str] = deque(maxlen=4)
        self._dropped = 0  # lines that could not be written
        self._log = threading.Thread(target=self._copy_log, name="tensorferry-log", daemon=True)
        self._log.start()
        try:
            worker = Worker(ours)
            os.register_at_fork(after_in_child=worker.link.forget)
            self._prepared = load(worker, model, declarations, training)
            self._thread = threading.Thread(target=self._compute, args=(worker,), name="tensorferry-model", daemon=True)
            self._thread.start()
            assert self._process.stdout is not None
            self.address = self._process.stdout.readline().decode().strip()
            if not self.address:
                raise LinkError("")
        except BaseException as err:
            self.close()
            ours.close()
            if isinstance(err, LinkError):  # the server knows better
                said = [line for line in self._last if line.startswith(("tensorferry: ", "hint: "))]
                why = " ".join(line.partition(": ")[2] for line in said if line.startswith("t"))
                hint = " ".join(line.partition(": ")[2] for line in said if line.startswith("h"))
                code = self._process.returncode
                raise LinkError(f"the server did not start: {why or f'exit code {code}'}", hint=hint) from None
            raise

    def _copy_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                text = line.decode(errors="replace")
                self._last.append(text.rstrip())
                self._write(text)

    def _write(self, text: str) -> None:
        try:
            if self._dropped:
                sys.stderr.write(f"tensorferry: {self._dropped} lines of the server's log could not be written\n")
            self._dropped = 0
            sys.stderr.write(text)
        except Exception:  # stderr is None or closed, say; the server's pipe is read all the same
            self._dropped += 1

    def __repr__(self) -> str:
        return f"<tensorferry.Server at {self.address}>"

    def _compute(self, worker: Worker) -> None:
        torch = sys.modules.get("torch")
        if torch is not None:  # what set_num_threads said holds, in part, for threads that say it again
            torch.set_num_threads(torch.get_num_threads())
        try:
            worker.serve(self._prepared)
        finally:
            worker.link.close()
            worker.teardown()

    def wait(self) -> None:
        """Waits until the server ends. Ctrl-C ends it."""
        try:
            self._process.wait()
        except KeyboardInterrupt:
            pass
        self.close()
        if self._process.returncode:
            raise LinkError(f"the tensorferry server ended with exit code {self._process.returncode}")

    def close(self) -> None:
        """Lets open calls finish for a while, and ends the server. Closing twice is a no-op."""
        with self._stopping:
            process = self._process
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.join(STOP_SECONDS)
        thread: Optional[threading.Thread] = getattr(self, "_thread", None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    model: Any,
    port: int = 50051,
    *,
    host: str = "127.0.0.1",
    name: Optional[str] = None,
    options: Sequence[str] = (),
    checkpoint: Optional[str] = None,
    checkpoint_every: int = 100,
    **declarations: Any,
) -> Server:
    """Serves a function, a Model, a torch module, or a factory of one, computed by a thread of this process.

    It returns when the server listens, at `.address`; port 0 is any free one. `.wait()` waits for Ctrl-C.
    declarations are those of tensorferry.model, options more arguments of `tensorferry serve`. A model that
    trains (train=True) writes a checkpoint to a folder every so many steps, and goes on from there.
    """
    if name is None:
        name = model.rpartition(":")[2] if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    training = {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every}
    return Server(model, listen, name, options, training, declarations)
