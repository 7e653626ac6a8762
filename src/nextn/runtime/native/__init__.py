"""The native backend: a model's passes, recorded and lowered to programs of a small C++ runtime for CPUs."""

import os
import threading

# One lock for the whole process: all models share the runtime's threads, and recording replaces functions of
# transformers' modules. It is reentrant, and held for one round or one recording, never across a `yield`, so that an
# abandoned generator blocks nobody.
LOCK = threading.RLock()

# A fork waits until no other thread is in a round: that thread would not exist in the child.
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
