"""A lock that says who holds it: one run at a time in a directory of runs or of checkpoints.

It is flock's: it belongs to the open file and goes with its process, however that ends, so that there is nothing to
clean up and a killed run can be resumed at once. NFS carries it between machines; there a lock of a machine that died
stays until the server's lease has run out, a minute or two. The file itself stays and means nothing by being there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class InUse(Exception):
    """Another process has it; the message says which, as `process 123 on some-host`."""


class LockFile:
    """A lock that is held. is_sole: False on a file system without locks, where nobody is kept out."""

    def __init__(self, path: Path) -> None:
        """Take the lock, making the file where it is not there. Raises `InUse`, or OSError naming the file."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self.is_sole = self._lock()
        except BaseException:
            os.close(self._descriptor)
            raise

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that is locked."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def release(self) -> None:
        os.close(self._descriptor)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(_holder(os.pread(self._descriptor, 400, 0))) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        return True


def _holder(text: bytes) -> str:
    """The holder writes itself down just after it has the lock: for a moment there is nothing."""
    number, _, host = text.decode(errors="replace").strip().partition(" ")
    return f"process {number or 'unknown'} on {host or 'an unknown machine'}"
