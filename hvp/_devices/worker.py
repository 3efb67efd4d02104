"""One worker on this machine: a TensorFlow server that ends when its standard input does.

It runs as a program of its own, without the rest of the package.
"""

from __future__ import annotations

import os
import sys


def main(address: str, job: str, index: int, loopback: bool) -> None:
    """Serve until the process that started this one ends."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import loopback as interfaces

    before = interfaces.listening()
    cluster = tf.train.ClusterSpec({job: {index: address}})
    server = tf.distribute.Server(cluster, job_name=job, task_index=index)
    if loopback:
        interfaces.restrict(interfaces.listening() - before)
    print(f"ready {tf.__version__}", flush=True)
    sys.stdin.read()
    del server
    os._exit(0)  # the server has threads that do not end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "loopback")
