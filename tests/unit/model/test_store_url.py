from __future__ import annotations

import pytest

from asyncckpt.errors import UsageError
from asyncckpt.model.store_url import KEY_BYTES_MAX, StoreUrl


@pytest.mark.parametrize("text", ["s3://bucket/run", "gs://a.b-c/x/y_z", "az://container/run=1/a b"])
def test_a_url_comes_back(text: str) -> None:
    assert str(StoreUrl.of(text)) == text
    assert str(StoreUrl.of(text + "/") / "data") == f"{text}/data"


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3://bucket//run",
        "s3://bucket/../run",
        "s3://bucket/./run",
        "s3://bucket/run//x",
        "s3://bucket/run\nx",
        "s3://bucket/rün",
        "s3:///run",
        "ftp://host/run",
        "http://bucket/run",
        f"s3://bucket/{'x' * KEY_BYTES_MAX}",
    ],
)
def test_what_is_no_prefix_in_a_bucket_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        StoreUrl.of(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:SECRET@bucket/run",
        "s3://key:SEC/SECRET/x@bucket/run",
        "s3://key:SECRET/run",
        "s3://SECRET",
        "s3://bucket/key:SECRET@host",
        "s3://bucket/SECRET@host",
        "s3://bucket/run?token=SECRET",
        "s3://bucket/run&X-Amz-Signature=SECRET",
        "s3://bucket/SECRET//x",
        f"s3://bucket/SECRET{'x' * KEY_BYTES_MAX}",
        "SECRET://bucket/run?x",
    ],
)
def test_no_error_shows_a_secret(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        StoreUrl.of(text)
    assert "SEC" not in str(refused.value)
