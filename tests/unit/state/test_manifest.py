"""A manifest says what was written, or is refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from instep.errors import CheckpointError
from instep.state.files.manifest import (
    CheckpointManifest,
    FileEntry,
    check_file,
    decode,
    encode,
    file_name,
    open_regular,
    read_manifest,
    seal,
)

HERE = Path("manifest.json")


def a_manifest(**changes):
    fields = {
        "step": 3,
        "instep": "1",
        "torch": "2",
        "files": {"model.safetensors": FileEntry(8, "ab" * 32)},
        "facts": {"seed": 2**80, "lr": 0.1, "text": "ä\ud800", "none": None, "deep": [{"a": []}]},
    }
    return CheckpointManifest(**(fields | changes))


def resealed(change):
    """The bytes of a manifest after `change` edited its entries and sealed it again."""
    entries = json.loads(encode(a_manifest()))
    del entries["seal"]
    change(entries)
    text = json.dumps(entries)[:-1] + ',\n"seal": "'
    return seal(text.encode())


def test_a_manifest_comes_back_as_it_was():
    assert decode(encode(a_manifest()), HERE) == a_manifest()
    assert decode(resealed(lambda entries: None), HERE) == a_manifest()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(step="3"), "step"),
        (lambda m: m.update(step=3.0), "step"),
        (lambda m: m.update(step=-1), "never negative"),
        (lambda m: m.update(extra=1), "extra"),
        (lambda m: m.pop("torch"), "torch"),
        (lambda m: m.update(facts=[]), "facts"),
        (
            lambda m: m.update(version=1, instep="0.1.7"),
            r"written by instep 0\.1\.7 in format 1; .* Use instep 0\.1 for it\.",
        ),
        (lambda m: m.update(version=9, instep="odd"), r"in format 9; .* Use the one that wrote it"),
        (lambda m: m.update(version="2"), "its version is '2'"),
        (lambda m: m.update(version=True), "its version is True"),
        (lambda m: m.pop("version"), "its version is None"),
        (lambda m: m.update(format="other"), "not a manifest of an instep checkpoint"),
        (
            lambda m: m["files"].update(
                {"../x.safetensors": {"size_bytes": 1, "sha256": "0" * 64}}
            ),
            "x",
        ),
        (lambda m: m["files"].update({"x.bin": {"size_bytes": 1, "sha256": "0" * 64}}), "x.bin"),
        (lambda m: m["files"]["model.safetensors"].update(sha256="no"), "SHA-256"),
        (lambda m: m["files"]["model.safetensors"].update(size_bytes=-8), "size"),
        (lambda m: m["files"]["model.safetensors"].update(mode=7), "mode"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_even_under_a_good_seal(change, says):
    with pytest.raises(CheckpointError, match=says):
        decode(resealed(change), HERE)


def test_an_edit_breaks_the_seal():
    data = encode(a_manifest()).replace(b'"lr": 0.1', b'"lr": 0.2')
    with pytest.raises(CheckpointError, match="edited"):
        decode(data, HERE)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": 1}'])
def test_other_bytes_are_no_manifest(data):
    with pytest.raises(CheckpointError):
        decode(data, HERE)


def test_a_folder_under_a_false_name_is_refused(tmp_path):
    folder = tmp_path / "step-00000004"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(encode(a_manifest()))
    with pytest.raises(CheckpointError, match="of step 3, but its folder is called step-00000004"):
        read_manifest(folder)
    assert read_manifest(folder.rename(tmp_path / "best")).step == 3


def test_a_group_must_have_a_name_for_a_file():
    assert file_name("optimizer") == "optimizer.safetensors"
    for group in ("a/b", "", "..", "ä"):
        with pytest.raises(CheckpointError):
            file_name(group)


def test_what_is_no_plain_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a file"):
        open_regular(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        check_file(tmp_path / "nothing", FileEntry(0, "0" * 64))


def test_what_reads_no_tensors_imports_no_torch():
    files = ("files.manifest", "files.model_file", "export.export")
    names = (*files, "intact", "retention", "compare")
    modules = ", ".join(f"instep.state.{name}" for name in names)
    code = f"import {modules}, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
