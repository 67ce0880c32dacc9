"""Memory that processes of one host share, without names: nothing is left after `kill -9`.

The owner makes a memfd, and allocates all of it before use: a full memory is an error, not a SIGBUS
at the first touch. Readers open it through the owner's /proc entry, read-only, and check that it
is the very file and of the size that was announced.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

import msgspec
import torch

from reshard.errors import ReshardError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value

# Not in the fcntl module.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4

_SPARE_BYTES = 256 * 2**20
"""Memory that a new segment leaves free."""


class Segment(msgspec.Struct, frozen=True):
    """Where a reader finds shared memory.

    Attributes:
        pid: of the owner.
        descriptor: the owner's file descriptor.
        inode: of the file, so that a descriptor or process number used again is noticed.
        nbytes: its exact size.
    """

    pid: int
    descriptor: int
    inode: int
    nbytes: int


class OwnedSegment:
    """Shared memory of this process, freed when it is closed or the process ends.

    Attributes:
        segment: where readers find it.
        memory: all of it, flat uint8.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        """Make and allocate it.

        Args:
            name: for /proc/<pid>/maps.
            nbytes: size; at least 1 is taken.

        Raises:
            ReshardError: there is no room.
        """
        size = max(1, nbytes)
        _check_room(size)
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            # Nobody can shorten it under a reader.
            seals = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, _F_ADD_SEALS, seals)
            self.memory = _map(self._descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(self._descriptor)
            raise _no_room(size, error) from error
        inode = os.fstat(self._descriptor).st_ino
        self.segment = Segment(os.getpid(), self._descriptor, inode, size)
        self._closer = weakref.finalize(self, os.close, self._descriptor)

    def close(self) -> None:
        """Give it up; readers keep what they have mapped."""
        self._closer()


def share_storage(storage: torch.UntypedStorage) -> Segment:
    """Move a storage into shared memory, in place: every tensor on it, and its optimizer, follow.

    Raises:
        ReshardError: there is no room, or no file descriptor left.
    """
    try:
        descriptor, nbytes = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise ReshardError(
            f"a storage of {storage.nbytes()} bytes cannot be moved into shared memory: {error}; "
            "enlarge /dev/shm, raise `ulimit -n`, or publish snapshots instead of live shards"
        ) from error
    return Segment(os.getpid(), descriptor, os.fstat(descriptor).st_ino, nbytes)


def open_segment(segment: Segment, owner: str) -> torch.Tensor:
    """Map another process's shared memory, read-only; flat uint8.

    Writing to the tensor ends the process (SIGSEGV), so it stays within this package.

    Args:
        segment: what the owner announced.
        owner: what messages call it.

    Raises:
        ReshardError: it is gone, of another size, or may not be opened.
    """
    path = Path(f"/proc/{segment.pid}/fd/{segment.descriptor}")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ReshardError(f"the shared memory of {owner} is gone: no {path}") from error
    except OSError as error:
        raise ReshardError(
            f"the shared memory of {owner} cannot be opened: {error}; let trainer and engine run "
            'as one user and in one process namespace, or choose transport="gloo"'
        ) from error
    try:
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (segment.inode, segment.nbytes):
            raise ReshardError(
                f"the shared memory of {owner} is not what it announced: {path} has "
                f"{found.st_size} bytes (file {found.st_ino}), expected {segment.nbytes} "
                f"({segment.inode})"
            )
        return _map(descriptor, segment.nbytes, mmap.PROT_READ)
    except OSError as error:
        raise ReshardError(f"the shared memory of {owner} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def available_bytes() -> int:
    """Memory that may still be used here: of the machine, and of this process's cgroup."""
    available = 2**63
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        if Path(limit).exists() and Path(used).exists():
            bound = Path(limit).read_text().strip()
            if bound != "max":
                available = min(available, int(bound) - int(Path(used).read_text()))
    return max(0, available)


def _check_room(nbytes: int) -> None:
    # Allocating until it fails would bring the out-of-memory killer first.
    if nbytes + _SPARE_BYTES > available_bytes():
        raise _no_room(nbytes, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _no_room(nbytes: int, error: OSError) -> ReshardError:
    return ReshardError(
        f"no room for {nbytes} bytes of shared memory ({available_bytes()} available): {error}; "
        'share the live shards instead of a snapshot, or choose transport="gloo"'
    )


def _map(descriptor: int, nbytes: int, protection: int) -> torch.Tensor:
    """Map a file; unmapped when the last tensor on it is gone. Keeps no descriptor."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = _LIBC.mmap(None, nbytes, protection, flags, descriptor, 0)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    unmap = weakref.finalize(memory, _LIBC.munmap, address, nbytes)
    # The process's end unmaps; before that, other threads may still read.
    unmap.atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)
