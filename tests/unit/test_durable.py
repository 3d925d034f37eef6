"""Files that a crash of the host must not take are flushed to the disk before they have a name."""

import pytest

from disks import Syncs
from instep.data.shards.encode import encode
from instep.data.shards.urls.download import copied, file_system
from instep.data.shards.writer import ShardWriter
from instep.launch.join_folder import JoinFolder
from instep.plain_file import replace_plain
from instep.store.copies import restore
from instep.worker.replica import layout


def of_a_text(path):
    replace_plain(path, "text", durable=True)


def of_a_download(path):
    source = path.with_name("source")
    source.write_bytes(b"bytes")
    url = f"file://{source}"
    copied(file_system(url), url, path, lambda: None, lambda error: error)


def of_a_shard(path):
    columns = encode([{"x": 1.0}], None).columns
    with ShardWriter(path, columns) as writer:
        writer.write(encode([{"x": 1.0}], columns).views)
        writer.close(durable=True)


def of_an_invitation(path):
    folder = JoinFolder(path.parent / "certificates", clock=lambda: 0.0)
    folder._write(path, "text")


def of_a_copy(path):
    restore._write(path, [b"some", b"bytes"])


def of_a_layout(path):
    layout._put(path, b"bytes")


EVERY = [of_a_text, of_a_download, of_a_shard, of_an_invitation, of_a_copy, of_a_layout]


@pytest.mark.parametrize("written", EVERY)
def test_a_file_is_flushed(tmp_path, monkeypatch, written):
    syncs = Syncs(monkeypatch)
    written(tmp_path / "file")
    assert syncs.first(tmp_path / "file")


@pytest.mark.parametrize("durable", [False, True])
def test_a_text_is_flushed_only_if_that_is_asked_for(tmp_path, monkeypatch, durable):
    syncs = Syncs(monkeypatch)
    replace_plain(tmp_path / "file", "text", durable=durable)
    assert syncs.first(tmp_path / "file") == durable
