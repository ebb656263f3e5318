#!/usr/bin/env python3
"""Prints the tree digest of directories; written from docs/receipts.md alone, as a second opinion on `agentctl digest`.

usage: tree_digest.py DIR...

Needs only the `blake3` package. Prints one line per directory, `blake3:HEX`.
"""

import os
import stat
import sys

from blake3 import blake3

DIRECTORY = "agentd tree v1 directory"
ROOT = "agentd tree v1 root"
TYPES = {
    stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l", stat.S_IFIFO: b"p",
    stat.S_IFSOCK: b"s", stat.S_IFCHR: b"c", stat.S_IFBLK: b"b",
}


def number(value, width):
    return value.to_bytes(width, "big")


def content(path, info):
    """The 32 bytes that stand for what an entry holds."""
    kind = stat.S_IFMT(info.st_mode)
    if kind == stat.S_IFREG:
        with open(path, "rb") as file:
            hasher = blake3()
            while block := file.read(1 << 20):
                hasher.update(block)
        return hasher.digest()
    if kind == stat.S_IFLNK:
        return blake3(os.readlink(path)).digest()
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        return blake3(number(os.major(info.st_rdev), 4) + number(os.minor(info.st_rdev), 4)).digest()
    if kind == stat.S_IFDIR:
        entries = [entry(name, os.path.join(path, name)) for name in sorted(os.listdir(path))]
        return blake3(b"".join(entries), derive_key_context=DIRECTORY).digest()
    return bytes(32)


def entry(name, path):
    info = os.lstat(path)
    head = TYPES[stat.S_IFMT(info.st_mode)] + number(stat.S_IMODE(info.st_mode), 2)
    return head + number(len(name), 4) + name + content(path, info)


def tree_digest(path):
    return "blake3:" + blake3(entry(b"", path), derive_key_context=ROOT).hexdigest()


if __name__ == "__main__":
    for directory in sys.argv[1:]:
        print(tree_digest(os.fsencode(directory)))
