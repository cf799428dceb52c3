"""What obstore raises, as errors of this library: by the status of an answer and its code alone, never by its text."""

from __future__ import annotations

import errno
import re

from asyncckpt.errors import CheckpointError, IOFailedError, NotFoundError, UnsupportedError, UsageError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_SECONDS = re.compile(r"timed out|deadline|Timeout")

# Codes of S3 for which something can be done, or the status of an answer without one: that to a HEAD has no body.
_REFUSALS = {
    "400": (errno.EACCES, "the credentials may have expired: get new ones"),
    "NoSuchBucket": (errno.ENOENT, "make the bucket, or correct the URL"),
    "PermanentRedirect": (errno.ENOENT, "the bucket is in another region: set AWS_REGION"),
    "AccessDenied": (errno.EACCES, "these credentials lack a permission, see docs/object-stores.md"),
    "InvalidAccessKeyId": (errno.EACCES, "the store does not know this access key: look at AWS_ACCESS_KEY_ID"),
    "SignatureDoesNotMatch": (errno.EACCES, "the secret key is not the one of the access key: get a new pair"),
    "ExpiredToken": (errno.EACCES, "the credentials have expired: get new ones"),
    "InvalidToken": (errno.EACCES, "the session token is not valid: get new credentials"),
    "RequestTimeTooSkewed": (errno.EACCES, "the clock of this machine is off: set it"),
    "QuotaExceeded": (errno.EDQUOT, "the quota of the bucket is used up: remove objects, or ask for more"),
}
_OF_STATUS = {
    401: (errno.EACCES, "credentials are missing or not valid: look at the environment, or get new ones"),
    403: (errno.EACCES, "there are no credentials, or they lack a permission, see docs/object-stores.md"),
    404: (errno.ENOENT, "is there such a bucket? Make it, or correct the URL"),
    416: (errno.ERANGE, None),
}


class GoneError(NotFoundError):
    """There is no such object in the bucket."""


class NoBucketError(NotFoundError):
    """There is no such bucket, or it is elsewhere: nothing will come to be at this URL."""


def is_timeout(error: BaseException) -> bool:
    """Return whether a request was not answered, or not to the point: another try may help."""
    return isinstance(error, IOFailedError) and error.errno == errno.ETIMEDOUT


def refused(what: str, error: BaseException) -> CheckpointError:
    """Return an error of obstore as one of this library."""
    text = str(error).partition("Debug source")[0]
    if isinstance(error, FileNotFoundError) and "<Code>NoSuchBucket" not in text:
        return GoneError(f"{what}: it does not exist")
    if "builder error" in text:
        return UsageError(f"{what}: the endpoint is not https", hint="to allow http, set AWS_ALLOW_HTTP=true")
    status = int(found.group(1)) if (found := _STATUS.search(text)) else None
    code = found.group(1) if (found := _CODE.search(text)) else None
    if "redirect without LOCATION" in text:  # Of which obstore does not show the answer.
        status, code = 301, "PermanentRedirect"
    reason = " ".join(str(part) for part in (status, code) if part is not None)
    if code == "NotImplemented" or status == 501:
        what = f"{what}: the store does not support this request: {reason}"
        return UnsupportedError(what, hint="use another store, see docs/object-stores.md")
    number, hint = _REFUSALS.get(code or f"{status}") or _OF_STATUS.get(status or 0) or (0, None)
    if number == errno.ENOENT:
        return NoBucketError(f"{what}: the store refused: {reason}", hint=hint)
    if number:
        return IOFailedError(f"{what}: the store refused: {reason}", errno=number, hint=hint)
    if status is not None and status < 500 and status not in (408, 409, 429):
        hint = "look for that code in the pages of the store"
        return IOFailedError(f"{what}: the store refused: {reason}", errno=errno.EIO, hint=hint)
    if status is not None:
        hint = "it was asked again until a deadline: look at the state of the store, and try again"
        return IOFailedError(f"{what}: the store is busy or broken: {reason}", errno=errno.ETIMEDOUT, hint=hint)
    slow = "it did not answer in time" if _SECONDS.search(str(error)) else "the connection failed"
    hint = "is the endpoint right, and the network up?"
    return IOFailedError(f"{what}: {slow}", errno=errno.ETIMEDOUT, hint=hint)
