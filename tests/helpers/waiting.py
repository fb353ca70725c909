"""Waits for what another thread or process does."""

import threading
import time


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def in_threads(function, count):
    """Calls a function with each index in a thread of its own, and waits for all of them."""
    threads = [threading.Thread(target=function, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
