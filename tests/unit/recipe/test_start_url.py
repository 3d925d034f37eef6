"""A model at a URL: the bytes of the local one, of one version on all hosts, or a sentence."""

import json
import os
import shutil
import sys

import fsspec
import msgspec
import pytest
import torch
from safetensors.torch import save_file

from instep.client.job_checks import with_options
from instep.data.shards.urls import download, in_use, remote
from instep.errors import DataError, InstepError, SpecError
from instep.job import file as spec_file
from instep.job.data import DataSpec
from instep.job.spec import JobSpec
from instep.job.start import StartSpec
from instep.recipe.start.file import start_file
from instep.state.files.sharded import files_of
from lazily import needs
from loopback_store import LeapingClock, LoopbackFiles, Store, installed

pytestmark = needs("aiohttp")


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with the folder of a model in one file, and of one in two."""
    monkeypatch.setenv(remote.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(download, "PAUSES_S", (0.0,) * 6)
    installed(tmp_path)
    whole, parts = tmp_path / "here/whole", tmp_path / "here/parts"
    whole.mkdir(parents=True)
    parts.mkdir()
    save_file({"a": torch.arange(9.0), "b": torch.ones(2)}, whole / "model.safetensors")
    save_file({"a": torch.arange(9.0)}, parts / "model-1.safetensors")
    save_file({"b": torch.ones(2)}, parts / "model-2.safetensors")
    table = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(table))
    store = Store()
    store.put_folder(tmp_path / "here", "bucket")
    yield store
    store.close()
    while in_use._uses:
        in_use._uses.popitem()[1].close()


def contents(path):
    return [(each.name, each.read_bytes()) for each in files_of(path)]


NAMED = [
    *("whole", "whole/", "whole/model.safetensors", "parts"),
    "parts/model.safetensors.index.json",
]


@pytest.mark.parametrize("fault", ["", "503", "stall", "cut"])
@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("protocol", ["http", "loop"])
@pytest.mark.grid(12)
def test_a_model_at_a_url_is_the_local_one_and_is_asked_for_once(
    store, tmp_path, monkeypatch, protocol, named, fault
):
    if fault == "stall":
        LeapingClock(store, monkeypatch)
    store.faults = lambda _, __, number: fault if number in (2, 5, 8) else ""
    url = f"{getattr(store, protocol)}/bucket/{named}"
    job = with_options(JobSpec(recipe="a.py:recipe", start=StartSpec(model=url)))
    store.faults = lambda *_: "503"  # it may be gone by now
    asked = store.asked.total()
    assert contents(start_file(job.start)) == contents(
        start_file(StartSpec(model=str(tmp_path / "here" / named)))
    )
    assert store.asked.total() == asked


def test_the_same_url_with_other_bytes_is_another_version_and_refused_on_another_host(store):
    url = f"{store.http}/bucket/parts"
    start = with_options(JobSpec(recipe="a.py:recipe", start=StartSpec(model=url))).start
    store.objects["bucket/parts/model-2.safetensors"] += b" "
    assert start_file(start).is_file()  # this host has the version
    shutil.rmtree(remote.cache())
    with pytest.raises(SpecError, match=r"parts': .*/parts has changed since the run began, and"):
        start_file(start)


def test_a_model_in_memory_is_found_by_processes_that_have_not_put_it_there(store, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "here/whole"), "/tests/model", recursive=True)
    start = StartSpec(model="memory://tests/model")
    try:
        start = with_options(JobSpec(recipe="a.py:recipe", start=start)).start
    finally:
        memory.rm("/tests", recursive=True)
    assert contents(start_file(start))[0][1] == store.objects["bucket/whole/model.safetensors"]


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("{loop}/bucket/none", SpecError, "/none': there is no model.safetensors. Give the folder"),
        ("{http}/bucket/no.safetensors", SpecError, "names no file. Compare its name"),
        (
            "{loop}/bucket/dcp",
            SpecError,
            "torch.distributed.checkpoint, whose metadata is a pickle",
        ),
        ("{loop}/bucket/mesh", SpecError, "the ranks of a mesh saved this checkpoint in parts"),
        ("http://me:word@127.0.0.1:1/a", DataError, "'http://127.0.0.1:1/a': .* tried 7 times"),
        ("s3://bucket/m", SpecError, "without the package s3fs: pip install s3fs"),
        ("{loop}/bucket/away.safetensors.index.json", InstepError, "its index names '../b'"),
    ],
)
def test_what_is_no_model_is_one_sentence(store, monkeypatch, url, error, said):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # is not installed
    store.objects["bucket/dcp/.metadata"] = store.objects["bucket/mesh/part-0.safetensors"] = b""
    index = b'{"weight_map": {"a": "../b"}}'
    store.objects["bucket/away.safetensors.index.json"] = index
    with pytest.raises(error, match=said):
        start_file(StartSpec(model=url.format(http=store.http, loop=store.loop)))


@pytest.mark.parametrize("protocol", ["http", "loop"])
def test_a_store_that_lists_nothing_refuses_what_is_not_there(store, monkeypatch, protocol):
    """As S3 does for a key that may read objects only."""

    def info(files, path, **_):
        path = files._strip_protocol(path)
        _, headers = files._ask("HEAD", path)
        return {"name": path, "type": "file", "ETag": headers["ETag"], "size": None}

    monkeypatch.setattr(LoopbackFiles, "info", info)
    store.faults = lambda _, name, __: "" if name in store.objects else "403"
    url = f"{getattr(store, protocol)}/bucket"
    for name in ("whole", "parts"):
        assert start_file(StartSpec(model=f"{url}/{name}")).is_file()
    with pytest.raises(DataError, match=r"none/model\.safetensors cannot be read: .* 7 times"):
        start_file(StartSpec(model=f"{url}/none"))


def test_the_client_copies_a_model_into_the_cache_of_the_job(store, tmp_path):
    job = JobSpec(
        recipe="a.py:recipe",
        start=StartSpec(model=f"{store.http}/bucket/whole"),
        data=DataSpec(cache=str(tmp_path / "mine"), cache_gb=1),
    )
    with_options(job)
    assert list((tmp_path / "mine").rglob("model.safetensors"))
    assert remote.cache() == tmp_path / "cache"
    assert remote.GIGABYTES not in os.environ


def test_without_fsspec_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SpecError, match="without the package fsspec: pip install fsspec"):
        start_file(StartSpec(model="memory://a"))


def test_urls_in_a_job_file_stay_urls(tmp_path):
    table = {"recipe": "a.py:recipe", "start": {"model": "s3://bucket/a//b.safetensors"}}
    job = spec_file.absolute(spec_file.build(table, source="a test"), tmp_path)
    assert job.start.model == "s3://bucket/a//b.safetensors"
    assert msgspec.structs.asdict(job.start)["version"] == ""
