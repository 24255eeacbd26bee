"""Clients of a server that is restarted: restarts.py ADDRESS CLIENTS.

Each client calls the models again and once in turns until stdin ends, with retries, and prints of
each call the model, its number and its error. Six threads more share a client without retries and do
whatever there is to do: what fails has a typed error, and after the last restart all have results.
stress/restarts.go starts it.
"""

import collections
import contextlib
import functools
import gc
import os
import random
import sys
import threading

import stress

import tensorferry as tf


def calls(address: str, over: threading.Event, number: int) -> None:
    with tf.connect(address, retry="exponential", retry_for=60.0) as client:
        while not over.is_set():
            model = ("again", "once")[number % 2]
            x = tf.Tensor(number.to_bytes(8, "little"), (1,), "uint64")
            error = ""
            try:
                if bytes(client.compute(model, x).data) != number.to_bytes(8, "little"):
                    error = "a wrong result"
            except tf.Error as err:
                error = str(err).replace("\n", " ")
            assert sys.__stdout__ is not None
            sys.__stdout__.write(f"{model} {number} {error}".rstrip() + "\n")  # in one piece, beside other threads
            number += 1


def anything(client: tf.Client, tally: stress.Tally, over: threading.Event) -> None:
    rng, kept = random.Random(), collections.deque(maxlen=2)  # type: ignore[var-annotated]
    while not over.is_set() and not tally.over.is_set():
        err = stress.outcome(tally, lambda: stress.act(rng, client, kept, "r"))
        if err is not None:
            over.wait(err.retry_after or 0.05)
    stress.again(tally, lambda: stress.act(rng, client, kept, "r"), "results of all threads", 20)


def rest() -> dict[str, int]:
    gc.collect()
    pid = stress.own_link()
    sockets = sum("socket:" in os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return {"sockets": sockets, "threads": stress.usage(pid)["threads"]}


def main(address: str, clients: str) -> int:
    tally, over = stress.Tally("restarts"), threading.Event()
    client = tf.connect(address)
    base = rest()
    jobs = [functools.partial(anything, client, tally, over)] * 6
    jobs += [functools.partial(calls, address, over, (1 << 40) + (i << 32)) for i in range(int(clients))]
    jobs.append(lambda: (sys.stdin.read(), over.set()))
    stress.gather(tally, jobs)
    stress.clear(client)
    stress.returns(tally, "the link program", rest, base, {**stress.SLACK, "sockets": 4})
    client.close()
    return tally.end()


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        sys.exit(main(*sys.argv[1:]))
