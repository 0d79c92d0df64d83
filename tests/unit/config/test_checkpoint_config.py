"""Where checkpoints go, what stays, and that a key never gets into a configuration."""

from __future__ import annotations

import pytest

from digenrl.config.load import ConfigError, load_config, show

S3 = "checkpoint.url=s3://bucket/x"


@pytest.mark.parametrize(
    "overrides",
    [
        [S3, "checkpoint.endpoint=http://127.0.0.1:8333"],
        [S3, "checkpoint.credentials_block=s3-key"],
        ["checkpoint.url=/mnt/with@sign/x"],
        ["checkpoint.keep.best=2", "checkpoint.keep.every=50"],
    ],
)
def test_what_may_be_said(overrides: list[str]) -> None:
    load_config("tiny-ocr", overrides)


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["checkpoint.url=s3://AKIA:hidden@bucket/x"], "url holds a key"),
        (["checkpoint.url=s3://hidden@bucket/x"], "url holds a key"),
        ([S3, "checkpoint.endpoint=https://AKIA:hidden@s3.example.org"], "endpoint holds a key"),
        (["checkpoint.endpoint=http://h"], "endpoint is for S3 alone"),
        (["checkpoint.credentials_block=b"], "credentials_block is for S3 alone"),
        ([S3, "checkpoint.endpoint=h:1"], "endpoint must begin with http:// or https://, got 'h:1'"),
        (["checkpoint.keep=3"], "checkpoint.keep must be a section with keys such as last, best, every, got 3"),
        (["checkpoint.keep.last=0"], "checkpoint.keep.last must be an integer >= 1"),
        (["checkpoint.keep.best=1", "evaluation.every=0"], "checkpoint.keep.best=1 needs held-out rewards"),
    ],
)
def test_what_cannot_be_meant(overrides: list[str], fragment: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("tiny-ocr", overrides)
    assert fragment in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_a_configuration_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    assert "hidden" not in show(load_config("tiny-ocr", [S3]))
