"""The workers that TensorFlow is connected to: lost ones are removed until they answer again.

Whenever TensorFlow waits for all operations, as in Keras's `model.fit`, it waits for workers that
are gone, unless they have been removed from the cluster.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import tensorflow as tf

from hvp._devices.device import Device, LostDeviceError, all_devices, in_new_thread
from hvp._devices.reach import answers, has_ended
from hvp._graphs.private import addresses_of_workers, change_cluster

_log = logging.getLogger("hvp")

# Seconds in which all workers take part in a change.
_SECONDS = 10.0

_changing = threading.Lock()
# Devices that TensorFlow has been asked to leave, each with how often it had come back by then.
_left: set[tuple[str, int]] = set()


def leave_lost() -> None:
    """Remove workers that were lost since the last call; no operation may be running."""
    lost = _lost()
    if not {(device.name, device.lives) for device in lost} - _left:
        return
    with _changing:
        if _leave(lost):
            _left.update((device.name, device.lives) for device in lost)


def take_back() -> None:
    """Use lost workers again if they answer."""
    lost = _lost()
    if not lost:
        return
    with _changing:
        back = [device for device in lost if answers(device.address)]
        # TensorFlow would not connect anew to one that was started again but never left.
        if not back or not _leave(lost):
            return
        if _change({device.task: device.address for device in back}):
            for device in back:
                device.come_back()


def _lost() -> list[Device]:
    return [device for device in all_devices() if device.lost and device.is_remote]


def _leave(lost: list[Device]) -> bool:
    """Remove workers that end a call, if only by an error: TensorFlow calls each once more."""
    known = addresses_of_workers()
    tasks = {device.task for device in lost}
    left = {t for t, at in known.items() if has_ended(at) or (t in tasks and answers(at))}
    return _change(dict.fromkeys(left))


def _change(addresses: dict[Any, Any]) -> bool:
    """Connect to workers, and remove those whose address is None; return whether it worked.

    Nothing changes while a worker that stays does not answer: TensorFlow would wait for it, and all
    other code for TensorFlow.
    """
    if not addresses:
        return True
    stay = {**addresses_of_workers(), **addresses}
    silent = [at for at in stay.values() if at is not None and not answers(at)]
    if silent:
        _log.warning("the cluster is left as it is, as %s does not answer", ", ".join(silent))
        return False
    try:
        in_new_thread(functools.partial(change_cluster, addresses)).wait(_SECONDS)
    except (LostDeviceError, tf.errors.OpError) as error:
        _log.warning("the cluster could not be changed: %s", error)
        return False
    return True
