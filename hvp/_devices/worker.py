"""One worker on this machine: a TensorFlow server that ends when its standard input does.

It runs as a separate program, without the rest of the package.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path


def main(address: str, job: str, index: int, loopback: bool) -> None:
    """Serve until the process that started this one ends."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    interfaces = runpy.run_path(str(Path(__file__).with_name("loopback.py")))
    before = interfaces["listening"]()
    cluster = tf.train.ClusterSpec({job: {index: address}})
    server = tf.distribute.Server(cluster, job_name=job, task_index=index)
    if loopback:
        interfaces["restrict"](interfaces["listening"]() - before)
    print("ready", flush=True)
    sys.stdin.read()
    del server
    # The server has threads that do not end.
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "loopback")
