"""Which paths a checkpoint of sparse tables may have: RecSDK's rules, each of which can be relaxed.

Source of the rules: RecSDK `Saver`, whose page says "The length range is [1,1024] ... cannot contain soft links or
sensitive characters (such as keys, passwords, and private keys). Special paths (such as paths under /usr) cannot be
used. The path permission cannot be higher than 750", and "only the local file system". Where its code differs, the page
counts: all of /usr is special, and words are found whatever their case ("my_keys", "PASSWORD"). What the code has
besides is kept: /etc, 200 bytes of a relative path, 500 parts, the owner. Prefixes are compared by parts ("/etcetera"
is not below "/etc"), and permissions by bits (0707 is not below 0750).
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from asyncckpt.errors import IOFailedError, UsageError, Words, must_be
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.storage.directory import FOLDER_MODE, Directory, check_path

MOUNTS_FILE = "/proc/self/mountinfo"
FORBIDDEN_PREFIXES = ("/usr", "/etc")
SENSITIVE_WORDS = ("key", "password", "privatekey")
# A text of so many letters counts only as a word of its own, or its plural: there is a "key" in "monkey".
SHORT_WORD_MAX = 3
REMOTE_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "fuse", "fuseblk", "afs", "coda", "ceph", "glusterfs",
    "lustre", "gpfs", "beegfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "9p", "virtiofs", "vboxsf",
)  # fmt: skip


@dataclass(frozen=True)
class PathRules:
    """The rules for a path to save to or to load from; the default is strict.

    length_max            most bytes of the absolute path; None: as long as the system takes
    relative_length_max   most bytes of a path that is given relative to the working folder; None: any
    parts_max             most parts of the absolute path; None: any
    symlinks_allowed      whether a part of the path may be a symbolic link
    forbidden_prefixes    folders that the path must not be or lie below
    sensitive_words       texts that the path must not hold, whatever their case; one of up to 3 letters as a word only,
                          or its plural: "my_keys" and "apiKey" hold "key", "monkey" does not
    permission_max        permission bits that the folder, and the nearest one above it, may have; None: any
    owner_checked         whether both must belong to the user or the group of this process
    remote_file_systems   types of file systems, as in /proc/self/mountinfo, that are refused; "fuse" also means
                          "fuse.<anything>". Empty: any is taken, and object stores too
    """

    length_max: int | None = 1024
    relative_length_max: int | None = 200
    parts_max: int | None = 500
    symlinks_allowed: bool = False
    forbidden_prefixes: tuple[str, ...] = FORBIDDEN_PREFIXES
    sensitive_words: tuple[str, ...] = SENSITIVE_WORDS
    permission_max: int | None = FOLDER_MODE
    owner_checked: bool = True
    remote_file_systems: tuple[str, ...] = REMOTE_FILE_SYSTEMS

    def __post_init__(self) -> None:
        for name in ("forbidden_prefixes", "sensitive_words", "remote_file_systems"):
            texts = getattr(self, name)
            if not isinstance(texts, tuple) or not all(isinstance(text, str) and text for text in texts):
                # A bare str would be taken letter by letter, and "" is in every path.
                raise must_be(f"{name} of PathRules", "a tuple of non-empty str", texts)
        for name in ("length_max", "relative_length_max", "parts_max", "permission_max"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 0):
                raise must_be(f"{name} of PathRules", "an int, or None", number)

    def check_target(self, path: str | os.PathLike[str]) -> Place:
        """Return the absolute path, or URL, of a folder to save to, which may be missing. Raises UsageError; makes
        nothing.
        """
        if StoreUrl.is_url(path):
            return self._check_url(str(path))
        absolute = self._check_text(path)
        self._check_folders(absolute)
        folder = nearest_folder(absolute)
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise UsageError(f"folder {str(folder)!r} is not writable", hint="check owner and permission")
        return absolute

    def check_source(self, path: str | os.PathLike[str]) -> Place:
        """Return the absolute path, or URL, of a folder to load from. Raises UsageError."""
        if StoreUrl.is_url(path):
            return self._check_url(str(path))
        absolute = self._check_text(path)
        if not os.path.isdir(absolute):
            raise UsageError("path to load from is not a folder", found=str(absolute))
        self._check_folders(absolute)
        return absolute

    def check_links(self, path: Path) -> None:
        """Raise UsageError when a part of an absolute path is a symbolic link."""
        if self.symlinks_allowed:
            return
        for part in (*reversed(path.parents), path):
            if os.path.islink(part):
                raise UsageError(f"path {str(path)!r} holds a symbolic link", found=str(part))

    def _check_text(self, path: str | os.PathLike[str]) -> Path:
        absolute, given = check_path(path), os.fspath(path)
        real = Path(os.path.realpath(absolute))
        self._check_length(absolute, given)
        self._check_words(absolute, given)
        for prefix in self.forbidden_prefixes:
            if any(Path(prefix) in (place, *place.parents) for place in (absolute, real)):
                raise UsageError(f"path {str(absolute)!r} is a special one", found=Words(f"below {prefix!r}"))
        self.check_links(absolute)
        return absolute

    def _check_url(self, given: str) -> StoreUrl:
        url = StoreUrl.of(given)
        if self.remote_file_systems:
            raise _not_local(str(url), url.scheme)
        if self.length_max is not None and len(given) > self.length_max:
            raise UsageError("path is too long", found=len(given), expected=f"1 to {self.length_max} bytes")
        self._check_words(url, given)
        return url

    def _check_words(self, absolute: Place, given: str) -> None:
        for word in self.sensitive_words:
            # Also as it was given: "x/password/.." is gone from the absolute path.
            if _holds(given, word) or _holds(str(absolute), word):
                what = f"path {str(absolute)!r} holds a sensitive word"
                raise UsageError(what, found=word, hint="PathRules(sensitive_words=...) chooses the words")

    def _check_length(self, absolute: Path, given: str) -> None:
        length = len(os.fsencode(absolute))
        if self.length_max is not None and length > self.length_max:
            raise UsageError("path is too long", found=length, expected=f"1 to {self.length_max} bytes")
        length = len(os.fsencode(given))
        if self.relative_length_max is not None and not os.path.isabs(given) and length > self.relative_length_max:
            expected = f"at most {self.relative_length_max} bytes"
            raise UsageError("relative path is too long", found=length, expected=expected, hint="use an absolute path")
        parts_count = len(absolute.parts) - 1
        if self.parts_max is not None and parts_count > self.parts_max:
            raise UsageError("path has too many parts", found=parts_count, expected=f"at most {self.parts_max}")

    def _check_folders(self, absolute: Path) -> None:
        """Check the nearest folder above the path, and the path where it exists."""
        if os.path.lexists(absolute) and not os.path.isdir(absolute):
            raise UsageError("path is not a folder", found=str(absolute))
        above = nearest_folder(absolute.parent)
        if not os.path.isdir(above):
            raise UsageError("path is below what is not a folder", found=str(above))
        for folder in (above, absolute) if os.path.isdir(absolute) else (above,):
            self._check_owner_and_mode(folder)
        self._check_file_system(nearest_folder(absolute))

    def _check_owner_and_mode(self, folder: Path) -> None:
        if not hasattr(os, "geteuid"):  # Windows says nothing of owners and rights in these numbers.
            return
        try:
            status = os.stat(folder)
        except OSError as error:
            raise UsageError(f"folder {str(folder)!r} cannot be looked at: {error.strerror}") from error
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if self.permission_max is not None and mode & ~self.permission_max:
            raise UsageError(
                f"permission of folder {str(folder)!r} is too wide",
                found=oct(mode),
                expected=f"no bits beyond {oct(self.permission_max)}",
                hint="chmod 750, or PathRules(permission_max=...)",
            )
        if self.owner_checked and status.st_uid != os.geteuid() and status.st_gid != os.getegid():
            raise UsageError(
                f"folder {str(folder)!r} belongs to another user",
                found=Words(f"user {status.st_uid}, group {status.st_gid}"),
                expected=f"user {os.geteuid()} or group {os.getegid()}",
            )

    def _check_file_system(self, folder: Path) -> None:
        if not self.remote_file_systems:
            return
        found = file_system_of(Path(os.path.realpath(folder)))
        if found in self.remote_file_systems or found.split(".")[0] in self.remote_file_systems:
            raise _not_local(str(folder), found)


STRICT = PathRules()


def _not_local(place: str, found: str) -> UsageError:
    return UsageError(
        f"folder {place!r} is not on a local file system",
        found=found,
        hint="PathRules(remote_file_systems=()) takes any",
    )


def _holds(path: str, word: str) -> bool:
    """Return whether a path holds a sensitive word, whatever its case."""
    if len(word) > SHORT_WORD_MAX:
        return word.lower() in path.lower()
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", path)  # apiKeys, APIKeys: api_Keys, API_Keys.
    found = re.compile(rf"(?<![a-z]){re.escape(word.lower())}s?(?![a-z])")
    return any(found.search(text.lower()) for text in (path, parts))


def nearest_folder(path: Path) -> Path:
    """Return path, or the nearest one above it that exists."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def make_folders(path: Path) -> None:
    """Make a folder and what is missing above it, each durable and with mode 0750 whatever the umask.

    Raises CorruptError for what is no folder, IOFailedError.
    """
    above = nearest_folder(path)
    folder = Directory.open(above, exact_modes=True)
    for name in path.relative_to(above).parts:
        with folder:
            below = folder.child(name, create=True)
        folder = below
    folder.close()


def file_system_of(path: Path) -> str:
    """Return the type of the file system that a path, absolute and without links, lies on. Raises IOFailedError.

    By the mount points and not by device numbers, which btrfs and overlays give to each of their volumes.
    """
    try:
        lines = Path(MOUNTS_FILE).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        hint = "PathRules(remote_file_systems=()) does without"
        raise IOFailedError(f"{MOUNTS_FILE} cannot be read: {error.strerror}", errno=error.errno, hint=hint) from error
    best, found = -1, "unknown"
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount_point = Path(_unescaped(fields.split(" ")[4]))
        # A later mount on the same point hides the earlier one.
        if (mount_point == path or mount_point in path.parents) and len(mount_point.parts) >= best:
            best, found = len(mount_point.parts), rest.split(" ")[0]
    return found


def _unescaped(text: str) -> str:
    """Return a mount point as it is: the kernel writes blanks and backslashes as \\ooo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
