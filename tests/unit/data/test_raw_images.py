"""Folders of images: records are the files of the classes, at any cut."""

import os

import pytest
from raw_files import read

from instep.data.raw import FORMATS, sources
from instep.errors import DataError, SpecError


def folder_of(root, classes):
    """Images of some bytes: {class: [names]}."""
    for name, images in classes.items():
        for image in images:
            path = root / name / image
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(f"{name} {image}".encode())
    return root


def test_records_are_the_images_of_each_class_in_order_at_any_cut(tmp_path):
    images = {"b": ["2.png", "10.JPG", "in/1.webp"], "a": [f"{i}.png" for i in range(9)]}
    root, form = folder_of(tmp_path / "root", images), FORMATS["images"]()
    (root / "a" / "3.png").write_bytes(b"")
    expected = [
        (path.read_bytes(), path.parent.name if path.parent.name != "in" else "b", path)
        for path in sorted(root.rglob("*.*"))
        if path.stat().st_size
    ]
    for target, count in ((1 << 30, 2), (20, None), (1, 11)):
        pieces = form.cut(root, target)
        assert len(pieces) == (count or len(pieces))
        rows, bad = read(form, pieces)
        assert [(row["image"], row["class"], root / row["path"]) for row, _ in rows] == expected
        assert [row["label"] for row, _ in rows] == [0] * 8 + [1] * 3
        assert [form.where(root, place) for _, place in rows] == [row["path"] for row, _ in rows]
        assert [place for _, place in rows] == sorted(place for _, place in rows)
        assert [(form.where(root, place), text) for place, text in bad] == [
            ("a/3.png", "the file is empty")
        ]
    assert len(form.files(root)) == 12


def test_classes_are_numbered_over_all_folders_of_a_source(tmp_path):
    form = FORMATS["images"]()
    one = folder_of(tmp_path / "one", {"cat": ["1.png"], "dog": ["1.png"]})
    other = folder_of(tmp_path / "other", {"ant": ["1.png"], "dog": ["2.png"]})
    known = form.learn([one, other])
    labels = {}
    for root in (one, other):
        rows, _ = read(form, form.cut(root, 1 << 20, known))
        labels |= {row["class"]: row["label"] for row, _ in rows}
        assert [form.where(root, place) for _, place in rows] == [row["path"] for row, _ in rows]
    assert labels == {"ant": 0, "cat": 1, "dog": 2}


def test_images_that_went_since_they_were_cut_are_refused(tmp_path):
    root, form = folder_of(tmp_path, {"a": ["1.png", "2.png"]}), FORMATS["images"]()
    pieces = form.cut(root, 1)
    read(form, pieces)
    (root / "a" / "2.png").unlink()
    os.utime(root / "a", ns=(0, 0))  # as if some time had passed
    with pytest.raises(DataError, match=r"a has 1 images, and had 2 or more when it was cut"):
        read(form, pieces)


def test_a_folder_of_images_is_one_source_and_a_single_image_none(tmp_path):
    root = folder_of(tmp_path / "root", {"a": ["1.png"], "b/c": ["2.jpg"]})
    assert sources([str(root)]) == [(root, "images")]
    with pytest.raises(SpecError, match=r"1.png is one image. Name the folder that has a sub-fold"):
        sources([str(root / "a" / "*.png")])
    with pytest.raises(SpecError, match=r"a has images without a class. Name the folder"):
        sources([str(root / "a")])
