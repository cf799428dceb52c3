"""Where a checkpoint directory is: a folder of this machine, or a prefix in a bucket of an object store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from asyncckpt.errors import UsageError

SCHEMES = ("s3", "gs", "az")
KEY_BYTES_MAX = 1024
# Of `data/<step>-<attempt>/r<rank>-<index>.safetensors`, the longest name below a directory.
_NAMES_BYTES_MAX = 96
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PART = re.compile(r"[A-Za-z0-9!_.*'() =+-]+")


@dataclass(frozen=True)
class StoreUrl:
    """`<scheme>://<bucket>/<prefix>`; the prefix has no slash at either end."""

    scheme: str
    bucket: str
    prefix: str

    @staticmethod
    def of(text: str) -> StoreUrl:
        """Take a URL apart; UsageError, which shows nothing that could be a secret."""
        scheme, _, rest = text.partition("://")
        if scheme not in SCHEMES:
            expected = ", ".join(f"{known}://" for known in SCHEMES)
            raise UsageError("path is a URL of another kind", expected=f"{expected} or a folder")
        bucket, _, prefix = rest.partition("/")
        form = f"{scheme}://bucket/prefix"
        if any(mark in rest for mark in "@?#&"):
            raise UsageError(
                f"{scheme}:// URL holds more than a bucket and a prefix",
                expected=form,
                hint="credentials and options come from the environment, see docs/object-stores.md",
            )
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(f"{scheme}:// URL needs a bucket name of 2 to 255 characters", expected=form)
        parts = prefix.removesuffix("/").split("/") if prefix else []
        if not parts:
            what = f"{scheme}:// URL is a whole bucket"
            raise UsageError(what, hint=f"give each run a prefix, such as {scheme}://bucket/run1")
        if any(part in (".", "..") or not _PART.fullmatch(part) for part in parts):
            what = f"{scheme}:// URL holds what some stores do not take in a key"
            raise UsageError(what, expected=f"parts of {_PART.pattern} between single slashes")
        url = StoreUrl(scheme, bucket, "/".join(parts))
        if len(url.prefix) > KEY_BYTES_MAX - _NAMES_BYTES_MAX:
            raise UsageError(f"{scheme}:// URL is too long", expected=f"{KEY_BYTES_MAX} bytes a key")
        return url

    @staticmethod
    def is_url(path: object) -> bool:
        return isinstance(path, str) and "://" in path

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2]

    def __truediv__(self, name: str) -> StoreUrl:
        return StoreUrl(self.scheme, self.bucket, f"{self.prefix}/{name}")

    def __repr__(self) -> str:
        return f"StoreUrl({str(self)!r})"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"


Place = Path | StoreUrl
