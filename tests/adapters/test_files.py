"""Files that lie, and folders that are not what they seem."""

import json
import os
import re
import struct

import adapter_kit as kit
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lorac.runtime.adapters import read_adapter
from lorac.runtime.adapters.tensors import open_tensors
from lorac.runtime.errors import AdapterError


@pytest.fixture
def folder(tmp_path):
    return kit.write(tmp_path / "adapter", kit.factors("q_proj", "v_proj"))


def refuse(folder, message: str):
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(folder, kit.layout())
    assert str(folder) in str(caught.value)


def rewrite(folder, change):
    """Write the weights file anew with a changed header; `change` gets and edits the header's dict."""
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    encoded = (text or json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


@pytest.mark.parametrize("keep", [0, 5, 8, 40, 0.5, -1])
def test_truncated(folder, keep):
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    refuse(folder, "truncated")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_pointer_of_git_lfs_tells_how_to_fetch_the_file(name, folder):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5e' * 32}\nsize 83945296\n"
    (folder / name).write_text(pointer)
    refuse(folder, f"{name} is a git-lfs pointer, .*`git lfs pull`")


def test_bytes_behind_the_tensors(folder):
    with open(folder / "adapter_model.safetensors", "ab") as file:
        file.write(b"more")
    refuse(folder, "truncated or padded")


@pytest.mark.parametrize("length", [2**63, 10**8 + 1, 4096 * 1024])
def test_header_too_large(folder, length):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refuse(folder, f"announces a header of {length} bytes")


def test_overlapping_tensors(folder):
    def overlap(header):
        first, second = [name for name in header if name != "__metadata__"][:2]
        header[second]["data_offsets"] = header[first]["data_offsets"]
        header[second]["shape"] = header[first]["shape"]

    rewrite(folder, overlap)
    refuse(folder, r"starts at byte \d+, the one before it ends at")


def test_shape_and_size_disagree(folder):
    def grow(header):
        next(iter(header.values()))["shape"][0] += 1

    rewrite(folder, grow)
    refuse(folder, "of shape .* cannot take")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32"}, "lacks dtype, shape or data_offsets"),
        ([], "lacks dtype, shape or data_offsets"),
        ({"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}, "wrong type"),
        ({"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]}, "wrong type"),
        ({"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]}, "wrong type"),
        ({"dtype": "F32", "shape": "22", "data_offsets": [0, 16]}, "wrong type"),
        ({"dtype": 7, "shape": [4], "data_offsets": [0, 16]}, "wrong type"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]}, "lacks dtype"),
    ],
)
def test_entries_of_the_wrong_kind(folder, entry, message):
    rewrite(folder, lambda header: header.update(extra=entry))
    refuse(folder, message)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, '{"\\ud800": 1}'])
def test_headers_that_are_no_object(folder, text):
    rewrite(folder, lambda header: text)
    refuse(folder, "safetensors")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "nul", "[" * 100_000, '{"r": 1, "r": 2}', '{"r": ' + "9" * 5000 + "}", "\xff"]
)
def test_configs_that_are_no_object(folder, text):
    (folder / "adapter_config.json").write_bytes(text.encode("latin-1"))
    refuse(folder, re.escape("adapter_config.json cannot be read"))


def test_only_a_bin_file_tells_how_to_convert(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    os.remove(folder / "adapter_model.safetensors")
    torch.save(tensors, folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="only adapter_model.bin") as caught:
        read_adapter(folder, kit.layout())
    command = re.search(r'python -c "(.*)"$', str(caught.value), re.DOTALL)[1]
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(command)  # the remedy the message gives
    finally:
        os.chdir(before)
    read_adapter(folder, kit.layout())


def test_a_link_out_of_the_folder(folder, tmp_path):
    path = folder / "adapter_model.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refuse(folder, "outside its folder")


def test_a_linked_folder_and_the_hub_cache_are_no_such_links(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    read_adapter(tmp_path / "link", kit.layout())
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "c0ffee", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, name in enumerate(("adapter_config.json", "adapter_model.safetensors")):
        (folder / name).rename(blobs / str(index))
        (snapshot / name).symlink_to(f"../../blobs/{index}")
    read_adapter(snapshot, kit.layout())


def test_special_files_do_not_block(folder):
    os.remove(folder / "adapter_model.safetensors")
    os.mkfifo(folder / "adapter_model.safetensors")
    refuse(folder, "not a regular file")


def test_absent_things(folder, tmp_path):
    refuse(tmp_path / "nowhere", "not a folder")
    os.remove(folder / "adapter_model.safetensors")
    refuse(folder, "adapter_model.safetensors is missing; the folder holds adapter_config.json")
    (folder / "adapter_model.safetensors").symlink_to("adapter_model.safetensors")
    refuse(folder, "cannot be opened")


def test_a_file_that_changes_while_it_is_read(folder):
    with pytest.raises(AdapterError, match="changed while it was read"), open_tensors(folder) as file:
        os.utime(folder / "adapter_model.safetensors", ns=(1, 1))  # as a writer in place would
        file.check_unchanged()


def test_the_header_is_judged_as_the_safetensors_library_judges_it(folder):
    """Single bytes changed at random: what the library refuses we refuse, what it reads we read alike."""
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    generator = torch.Generator().manual_seed(5)
    agreed = 0
    for _ in range(400):
        changed = bytearray(data)
        at = int(torch.randint(8 + length, (), generator=generator))
        changed[at] = int(torch.randint(256, (), generator=generator))
        path.write_bytes(changed)
        try:
            theirs = load_file(path)
        except (SafetensorError, ValueError, KeyError):
            theirs = None
        try:
            with open_tensors(folder) as file:
                ours = {name: file.read(name) for name in file.headers}
        except AdapterError:
            ours = None
        if theirs is None or ours is None:
            assert ours is None, f"read what the library refuses: byte {at}"
            continue
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()) for name in ours)
        agreed += 1
    assert agreed > 20
