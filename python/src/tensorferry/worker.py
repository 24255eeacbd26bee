"""The command that `tensorferry serve --python NAME=module:function` starts: computes one model for that server."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import traceback

from ._worker import Worker, load


def main() -> int:
    """Runs the command that a server starts."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorferry.worker", description="Computes one model for a tensorferry server, which starts it."
    )
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the link")
    parser.add_argument("--blocks", help="FIRST:END, the blocks of a module to compute alone")
    parser.add_argument("--train", action="store_true", help="let clients train it")
    parser.add_argument("--lease", type=float, help="seconds for which a trainer that is cut off keeps others out")
    parser.add_argument("--checkpoint", help="folder for checkpoints")
    parser.add_argument("--checkpoint-every", type=int, help="steps between two checkpoints")
    parser.add_argument("target", help="module:function")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sock = socket.socket(fileno=args.fd)
    worker = Worker(sock)
    os.register_at_fork(after_in_child=worker.link.forget)
    try:
        model = load(worker, args.target, {"train": True} if args.train else None, vars(args))
    except Exception:
        traceback.print_exc()
        return 1
    torch = sys.modules.get("torch")
    if torch is not None and int(os.environ.get("TENSORFERRY_THREADS") or 0) > 0:
        torch.set_num_threads(int(os.environ["TENSORFERRY_THREADS"]))
    try:
        worker.serve(model)
    finally:
        worker.teardown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
