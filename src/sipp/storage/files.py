"""Atomic writes, checksums, and JSON with a checksum. Needs no torch.

On Windows, folders cannot be synced, and files have neither owner nor mode: both are skipped there. It was never run on
Windows or macOS.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Any

from sipp.errors import DataError, OptionError

TEMPORARY = ".tmp-"  # start of the name of a file that is being written
DAY_S = 86_400  # seconds; an older temporary file was left by a killed process
FORMAT = 1
MAX_NAME = 160
CHUNK = 1 << 20  # bytes read at once
CHANGED = "it was changed after it was written"  # in errors of those who check
_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*")
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY) + r"[0-9a-f]{16}-(.+)", re.DOTALL)  # what it is to become
# What an fsync of a folder gives where a file system has none, or the folder may be written but not read
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF)

Values = dict[str, Any]


def is_name(name: str) -> bool:
    """Whether it can name a run, a stage or a file: letters and digits with single dots or dashes between them."""
    return _NAME.fullmatch(name) is not None and len(name) <= MAX_NAME


def check_name(name: str) -> str:
    """The name, if it can name a run, a stage or a file."""
    if not is_name(name):
        raise OptionError(
            f"{name!r} cannot name a run, a stage or a file", fix="use letters, digits, and . or - between them"
        )
    return name


def child_path(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`; raises if a symbolic link is there, since it leads elsewhere."""
    path = folder / check_name(name)
    if path.is_symlink():
        raise OptionError(f"{path} is a symbolic link, and leads elsewhere", fix="remove it")
    return path


def sha256_of(*parts: bytes | memoryview) -> str:
    """SHA-256 of the concatenated parts, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file, of any size."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def temporary_path(path: Path) -> Path:
    """A unique path beside `path`, for a file or folder that is renamed when it is complete."""
    return path.parent / f"{TEMPORARY}{secrets.token_hex(8)}-{path.name}"


def target_of_temporary(path: Path) -> str | None:
    """The final name of a path from `temporary_path`; None for any other path."""
    match = _TEMPORARY_NAME.fullmatch(path.name)
    return None if match is None else match.group(1)


def write_synced(path: Path, data: bytes | memoryview, like: os.stat_result | None = None) -> None:
    """Writes a new file and syncs it to disk, with the permissions and (if allowed) the owner of the file `like`."""
    mode = 0o666 if like is None else like.st_mode & 0o777
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        if like is not None and os.name == "posix":
            with contextlib.suppress(OSError):  # only some may give files away
                os.chown(path, like.st_uid, like.st_gid)
            os.chmod(path, mode)  # the umask may have taken some away
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(unfinished: Path, path: Path) -> None:
    """Renames a complete file or folder to its final name, atomically, and syncs the rename to disk."""
    os.replace(unfinished, path)
    sync_folder(path.parent)


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Replaces the content of a file atomically: it always holds either the old data or the new.

    A symbolic link stays, and its target is written; an existing file keeps its permissions. Several threads and
    processes may write to one path; one of them wins. Order: temporary file, its fsync, replace, fsync of the folder.
    Without the last, a power cut may undo the replace.
    """
    try:
        target = path if not path.is_symlink() else Path(os.path.realpath(path))
        there = _plain_file(target)
        unfinished = temporary_path(target)
        try:
            write_synced(unfinished, data, like=there)
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"could not be written ({error.strerror or error}); what was there before is untouched",
            where=path,
            fix="free space or allow writing and run the same command again, or give another place",
        ) from error
    try:
        sync_folder(target.parent)
    except OSError as error:
        raise DataError(
            f"was written completely, but a power cut may undo that ({error.strerror or error})",
            where=path,
            fix="check the disk, and write it again",
        ) from error
    with contextlib.suppress(OSError):  # others clean up too, and not everybody may look in there
        _remove_stale(target)


def _plain_file(path: Path) -> os.stat_result | None:
    """The status of the file, None if there is none; raises for devices, pipes and loops of links."""
    try:
        status = os.lstat(path)  # a link that is still one leads nowhere
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file")
    return status


def _remove_stale(path: Path) -> None:
    """Removes temporary files of killed writers, which are older than a day."""
    for neighbour in path.parent.iterdir():
        if target_of_temporary(neighbour) == path.name:
            status = neighbour.lstat()
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > DAY_S:
                neighbour.unlink()


def sync_folder(folder: Path) -> None:
    """Syncs the folder's directory entries to disk, if the system supports that (not on Windows)."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def make_folder(folder: Path) -> None:
    """Creates the folder, and syncs its name to disk."""
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        except OSError as error:
            raise DataError(f"the folder could not be made ({error.strerror or error})", where=folder) from error


def remove_leftovers(folder: Path) -> None:
    """Removes all temporary files in a folder. Only the holder of its lock may call this."""
    for path in folder.rglob(f"{TEMPORARY}*"):
        if target_of_temporary(path) is not None and not path.is_dir():
            path.unlink(missing_ok=True)


def write_json(path: Path, values: Values) -> None:
    """Writes the values as JSON, with a checksum."""
    write_atomic(path, json_with_checksum(values))


def json_with_checksum(values: Values) -> bytes:
    """The content of a file for `read_json`."""
    text = json.dumps(seal({"format": FORMAT, "values": values}), sort_keys=True, allow_nan=False, indent=1)
    return text.encode()


def read_json(path: Path, data: bytes | None = None) -> Values:
    """The values in a JSON file or its bytes; the DataError names the file and what is wrong with it."""
    content = read_sealed(path, data)
    if content.get("format") != FORMAT or not isinstance(content.get("values"), dict):
        raise DataError(f"format {content.get('format')!r} is not {FORMAT}, the one this version reads", where=path)
    values: Values = content["values"]
    return values


def seal(values: Values) -> Values:
    """The values, and a checksum over them under "check"."""
    return {**values, "check": _check_of(values)}


def read_sealed(path: Path, data: bytes | None = None) -> Values:
    """The values given to `seal`, read from a JSON file or its bytes; DataError if they were changed since."""
    try:
        content = json.loads(read_file(path) if data is None else data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not whole JSON ({error}); it was changed or truncated", where=path) from error
    check = content.pop("check", None) if isinstance(content, dict) else None
    if not isinstance(content, dict) or check != _check_of(content):
        raise DataError(
            "its checksum does not match its content; it was changed after it was written, or truncated", where=path
        )
    return content


def read_file(path: Path) -> bytes:
    """The bytes of a file; a DataError names a file that cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", where=path) from error


def _check_of(body: Values) -> str:
    return sha256_of(json.dumps(body, sort_keys=True).encode())
