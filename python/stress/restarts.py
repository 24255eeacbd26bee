"""Clients of a server that is restarted: restarts.py ADDRESS THREADS.

Each calls the models again and once in turns until stdin ends, and prints of each call the
model, its number and its error. stress/restarts.go starts it.
"""

import sys
import threading

import tensorferry as tf


def calls(address: str, number: int, over: threading.Event) -> None:
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
            sys.stdout.write(f"{model} {number} {error}".rstrip() + "\n")  # in one piece, beside other threads
            number += 1


over = threading.Event()
threads = [
    threading.Thread(target=calls, args=(sys.argv[1], (1 << 40) + (i << 32), over)) for i in range(int(sys.argv[2]))
]
for t in threads:
    t.start()
sys.stdin.read()
over.set()
for t in threads:
    t.join()
