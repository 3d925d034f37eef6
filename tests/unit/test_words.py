"""Texts that others see show no passwords."""

import pytest

from instep.report.figures.identity import flat
from instep.words import shown_error, shown_url, without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a b#1.csv", "s3://bucket/a b#1.csv"),
        ("s3://bucket/a?versionId=1", "s3://bucket/a"),
        ("https://me:word@host:80/a@b#c?token=word", "https://host:80/a@b#c"),
        ("https://word@host/a", "https://host/a"),
        ("sftp://me@host/a", "sftp://me@host/a"),
        ("sftp://me:w@rd@host/a", "sftp://me@host/a"),
        ("s3://KEY:wo/r+d@bucket/a", "s3://KEY@bucket/a"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("zip://a.csv::https://me:word@host/a.zip", "zip://a.csv::https://host/a.zip"),
        ("start.model=s3://KEY:word@bucket/a", "start.model=s3://KEY@bucket/a"),
        ("abfs://container@account.net/a", "abfs://container@account.net/a"),
        ("what? no", "what? no"),
    ],
)
def test_a_url_is_shown_without_what_is_secret_and_with_all_else(url, shown):
    assert shown_url(url) == shown


def test_a_job_and_an_error_are_shown_without_secrets():
    job = {"start": {"model": "s3://KEY:word@b/m"}, "prepare": {"sources": ("http://u:word@h/a",)}}
    shown = [("start.model", "s3://KEY@b/m"), ("prepare.sources", '["http://h/a"]')]
    assert list(flat(job)) == shown
    assert "word" not in str(without_secrets(job))
    text = "403, url='http://me:word@host/a?sig=word' (s3://KEY:word@b)"
    assert shown_error(text) == "403, url='http://host/a' (s3://KEY@b)"
