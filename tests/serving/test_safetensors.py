"""Headers of safetensors files, of which every byte may be wrong."""

import json
import random
import struct

import pytest

from tonnage.catalog.models import find_model
from tonnage.errors import UnreadableModel
from tonnage.serving.network import read_network
from tonnage.serving.safetensors import StoredTensor, read_folder, read_header


def write(path, header, data=b""):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD = {"__metadata__": {"format": "pt"}, "a": entry([2, 3], 0, 24), "b": entry([5], 24, 34, "BF16")}


def test_tensors_of_a_file(tmp_path):
    file = write(tmp_path / "model.safetensors", GOOD, bytes(34))
    assert read_header(file) == (StoredTensor("a", "F32", (2, 3), 24), StoredTensor("b", "BF16", (5,), 10))
    assert read_folder(tmp_path) == read_header(file)


@pytest.mark.parametrize(("names", "refused"), [((1, 2), False), ((1,), True), ((2,), True)], ids=str)
def test_parts_that_are_missing_are_said(tmp_path, names, refused):
    for number in names:
        data = {f"layer.{number}": entry([1], 0, 4)}
        write(tmp_path / f"model-{number:05}-of-00002.safetensors", data, bytes(4))
    if refused:
        with pytest.raises(UnreadableModel, match="has 1 of 2 parts"):
            read_folder(tmp_path)
    else:
        assert len(read_folder(tmp_path)) == 2


def test_a_folder_with_far_less_than_its_configuration_says_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(find_model("smollm2-135m").config()))
    write(tmp_path / "model.safetensors", {"a": entry([1], 0, 4)}, bytes(4))
    with pytest.raises(UnreadableModel, match="holds 4 B of weights, too little for the 134,515,008 parameters"):
        read_network(str(tmp_path))


def test_a_file_of_the_library(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    import numpy as np

    library.save_file({"w": np.zeros((3, 4), np.float16)}, tmp_path / "x.safetensors")
    assert read_folder(tmp_path) == (StoredTensor("w", "F16", (3, 4), 24),)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "would have 1 bytes"),
        (b"[1]", b"", "without names"),
        (b"\xff\xff", b"", "not JSON"),
        (b"[" * 10_000 + b"]" * 10_000, b"", "not JSON|without names"),
        ({"a": 3}, b"", "no description"),
        ({"a": entry([-1], 0, 4)}, b"1234", "no shape"),
        ({"a": entry([True], 0, 4)}, b"1234", "no shape"),
        ({"a": entry([2**50], 0, 4)}, b"1234", "no shape"),
        ({"a": entry([1], 4, 0)}, b"1234", "no place"),
        ({"a": entry([1], 0, 2**70)}, b"1234", "no place"),
        ({"a": entry([1], 0, 4, "F128")}, b"1234", "unknown dtype 'F128'"),
        ({"a": entry([1], 0, 4, ["F32"])}, b"1234", "unknown dtype"),
        ({"a": entry([2], 0, 4)}, b"1234", "4 bytes, not those of its shape"),
        ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"1234", "do not follow one another"),
        ({"a": entry([1], 4, 8)}, bytes(8), "do not follow one another at byte 0"),
        ({"a": entry([1], 0, 4)}, bytes(9), "has 9 bytes of tensors; its header says 4"),
    ],
)
def test_damaged_headers_are_one_clear_line(tmp_path, header, data, message):
    file = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(UnreadableModel, match=message) as refused:
        read_header(file)
    assert "\n" not in str(refused.value)


def test_a_header_longer_than_the_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(UnreadableModel, match="is not a safetensors file"):
        read_header(file)
    file.write_bytes(b"123")
    with pytest.raises(UnreadableModel, match="is not a safetensors file"):
        read_header(file)


def test_a_tensor_in_two_files(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {"w": entry([1], 0, 4)}, bytes(4))
    with pytest.raises(UnreadableModel, match="two files hold the tensor 'w'"):
        read_folder(tmp_path)


def test_random_damage_is_refused_or_read(tmp_path):
    """Any bytes give tensors or an UnreadableModel, never another error."""
    file = write(tmp_path / "model.safetensors", GOOD, bytes(34))
    good, random_bytes = file.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(random_bytes.randint(1, 6)):
            damaged[random_bytes.randrange(len(damaged) - 34)] = random_bytes.randrange(256)
        file.write_bytes(bytes(damaged[: random_bytes.choice([len(damaged), random_bytes.randrange(len(damaged))])]))
        try:
            read_header(file)
        except UnreadableModel:
            refused += 1
    assert refused > 300


def test_only_files_of_the_index_are_read(tmp_path):
    for name, tensor in (
        ("model-1.safetensors", "a"),
        ("model-2.safetensors", "b"),
        ("consolidated.safetensors", "c"),
    ):
        write(tmp_path / name, {tensor: entry([1], 0, 4)}, bytes(4))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert [tensor.name for tensor in read_folder(tmp_path)] == ["a", "b"]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(UnreadableModel, match=r"lacks 1 of the 2 files .* such as 'model-2.safetensors'"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": "../x"}}', "[" * 10**5]
)
def test_an_index_that_is_none(tmp_path, content):
    write(tmp_path / "model-1.safetensors", GOOD, bytes(34))
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UnreadableModel):
        read_folder(tmp_path)
