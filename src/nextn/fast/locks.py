"""The one lock under which native code runs, passes are recorded and engines are made."""

import os
import threading

# One for the whole process: all models share the runtime's threads, and recording replaces functions of transformers'
# modules. Whoever holds it may take it again. It is held for a round or a recording and never across a `yield`, so a
# generator that is left half-read blocks nobody.
LOCK = threading.RLock()

# A child process is forked between rounds, never within one of another thread, which would not go on in the child.
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
