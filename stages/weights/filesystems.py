"""What is different from one filesystem to another: whether bytes must be flushed before others may be told of them, and where they lie."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

LOCAL = {
    0x0102_1994: "tmpfs",
    0x8584_58F6: "ramfs",
    0xEF53: "ext2, ext3, ext4",
    0x5846_5342: "xfs",
    0x9123_683E: "btrfs",
    0xF2F5_2010: "f2fs",
    0x2FC1_2FC1: "zfs",
    0xCA45_1A4E: "bcachefs",
    0x794C_7630: "overlay",  # what is written goes to its upper layer, which the kernel takes from a local filesystem only
}
"""Magic numbers (statfs(2), linux/magic.h) of filesystems whose page cache all readers share: they run on this host."""

_QUICKER_WRITTEN_OVER = frozenset({"tmpfs", "ext2, ext3, ext4"})
"""Those on which it was measured (docs/benchmarks.md): new pages, and new blocks, take longer than the bytes."""

POLICIES = ("auto", "always", "never")


def must_flush(policy: str, folder: Path) -> bool:
    """Are a published version and the records of the exchange in `folder` flushed before they get their names?

    `policy` is option weights.fsync. Readers on this host see what is in the page cache, flushed or not. What a crash of the host
    leaves of a version that was not flushed is found out by its digests, and of a record because it is no JSON; it ends all who
    take part as well, and the next attempt publishes again. On a network filesystem, or one that is not known, the bytes must have
    left this host before another one is sent to read them.
    """
    return policy == "always" or (policy == "auto" and not is_local(folder))


def is_local(folder: Path) -> bool:
    """Do all readers of `folder` run on this host?"""
    return filesystem_magic(folder) in LOCAL


def is_quicker_written_over(folder: Path) -> bool:
    """Is it worth while to write over old files in `folder`, and can this host tell whether somebody has them open?"""
    return LOCAL.get(filesystem_magic(folder)) in _QUICKER_WRITTEN_OVER


def lies_in_memory(folder: Path) -> bool:
    """Are files in `folder` memory of this host, and nothing else?"""
    return LOCAL.get(filesystem_magic(folder)) == "tmpfs"


def lies_on_a_disk_here(folder: Path) -> bool:
    """Does the kernel of this host write what is in `folder` to a disk, sooner or later?"""
    return is_local(folder) and not lies_in_memory(folder)


def filesystem_magic(path: Path) -> int:
    """f_type of statfs(2), which Python's os.statvfs leaves out. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(512)  # struct statfs has at most 120 bytes, and f_type is its first word
    if libc.statfs(os.fsencode(path), buffer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFF_FFFF
