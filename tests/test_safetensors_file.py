"""tensor_file: which files it accepts, which it refuses and how, and that a write either happens or leaves no trace."""

import errno
import json
import os
import tracemalloc

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick import loop
from safetensors.torch import load_file, save_file

from nextn.checkpoint import safetensors_file
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.safetensors_file import (
    HeaderBudget,
    RawTensor,
    atomic,
    read_header,
    write_json,
    write_safetensors,
)
from nextn.errors import CheckpointError

METADATA = {"format": "pt"}


def sample() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {f"model.{d}": torch.randn(3, 5, generator=g).to(d) for d in dtypes}
    tensors |= {f"int.{d}": torch.arange(7).to(d) for d in (torch.int8, torch.uint8, torch.int16, torch.int32)}
    tensors |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(1.5), "empty": torch.zeros(4, 0)}
    return tensors | {'odd "name"/é\n\x7f': torch.ones(2), "complex": torch.ones(2, dtype=torch.complex64)}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def file_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin, end, *, shape, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def u8(*values):
    return RawTensor("U8", [len(values)], bytes(values))


@pytest.fixture
def theirs(tmp_path):
    """A file that the safetensors library wrote."""
    path = tmp_path / "model.safetensors"
    save_file(sample(), path, metadata=METADATA)
    return path


def test_writes_what_the_library_writes(theirs, tmp_path):
    """Catches any difference in order, padding or escapes: the same file, byte for byte, and the library reads it."""
    opened, copy = Checkpoint.open(theirs), tmp_path / "new" / "copy.safetensors"
    write_safetensors(copy, {name: opened.raw(name) for name in reversed(opened.tensors)}, metadata=METADATA)
    assert copy.read_bytes() == theirs.read_bytes()
    for name, tensor in load_file(copy).items():
        assert raw_bytes(tensor) == raw_bytes(sample()[name])


@loop("dtype", safetensors_file.DTYPES)
def test_every_dtype_is_the_library_s(dtype, tmp_path):
    """Catches a wrong element width or a dtype that the library does not know, in both directions."""
    width, path = safetensors_file.DTYPES[dtype], tmp_path / "x.safetensors"
    write_safetensors(path, {"x": RawTensor(dtype, [2, 4], bytes(range(width)))})
    [(name, theirs)] = safetensors.deserialize(path.read_bytes())
    assert (name, theirs["shape"], bytes(theirs["data"])) == ("x", [2, 4], bytes(range(width)))
    assert read_header(path).tensors["x"].nbytes == width


def test_a_header_longer_than_the_first_read(theirs, monkeypatch):
    """Catches a gap or an overlap between the first read and the rest of a long header."""
    whole = read_header(theirs)
    for length in (8, 9, 100):
        monkeypatch.setattr(safetensors_file, "FIRST_READ", length)
        assert read_header(theirs) == whole


OK = entry(0, 4, shape=[4])
ATTACKS = {
    "shorter than the length field": (b"\x02\0\0", "3 bytes"),
    "length beyond the file": ((1000).to_bytes(8, "little") + b"{}", "claims 1000 bytes, 2 follow"),
    "length absurd": (b"\xff" * 8 + b"{}", "at most 100000000"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "git lfs pull"),
    "html page": (b"<!DOCTYPE html><html><body>Not Found</body></html>", "a server sends in place of a file"),
    "not utf-8": (file_bytes(b'{"\xff":1}'), "utf-8"),
    "lone surrogate": (file_bytes(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "surrogates"),
    "leading space": (file_bytes(b" {}"), "must start with"),
    "cut json": (file_bytes(b'{"a":'), "Expecting value"),
    "two documents": (file_bytes(b"{}{}"), "Extra data"),
    "deep nesting": (file_bytes(b'{"a":' + b"[" * 50_000), "recursion"),
    "ten million lists": (file_bytes(b'{"a":[' + b"[]," * 10_000_000), "20,000,002 JSON values, at most 100,000"),
    "600,000 tensors": (file_bytes(b"{" + b'"":{},' * 600_000), "600,000 tensors, at most 500,000 are read"),
    "number of 5000 digits": (file_bytes(b'{"a":' + b"9" * 5000 + b"}"), "digits"),
    "NaN": (file_bytes(b'{"a":NaN}'), "NaN is not JSON"),
    "tensor twice": (file_bytes(b'{"a":{},"b":{},"a":{}}'), "'a' appears 2 times"),
    "field twice": (file_bytes(b'{"a":{"dtype":"U8","dtype":"U8"}}'), "'dtype' appears 2 times"),
    "metadata is a list": (file_bytes({"__metadata__": ["a"]}), "strings to strings"),
    "metadata holds a number": (file_bytes({"__metadata__": {"step": 3}}), r"\['step'\] is 3"),
    "tensor is a number": (file_bytes({"a": 1}), "must hold dtype"),
    "three offsets": (file_bytes({"a": OK | {"data_offsets": [0, 2, 4]}}, b"1234"), "must hold dtype"),
    "unknown dtype": (file_bytes({"a": OK | {"dtype": "F7"}}, b"1234"), "dtype 'F7', valid are BOOL"),
    "dtype is a list": (file_bytes({"a": OK | {"dtype": ["U8"]}}, b"1234"), "must hold dtype"),
    "negative dimension": (file_bytes({"a": OK | {"shape": [-4]}}, b"1234"), "dimension -4"),
    "fractional dimension": (file_bytes({"a": OK | {"shape": [4.0]}}, b"1234"), r"dimension 4\.0"),
    "true as dimension": (file_bytes({"a": OK | {"shape": [4, True]}}, b"1234"), "dimension True"),
    "overflow that wraps to 4": (file_bytes({"a": OK | {"shape": [2**62 + 1, 4]}}, b"1234"), "overflows"),
    "a hundred thousand dimensions": (file_bytes({"a": OK | {"shape": [2**40] * 100_000}}, b"1234"), "overflows"),
    "half a byte": (file_bytes({"a": entry(0, 1, shape=[1], dtype="F4")}, b"1"), "whole bytes"),
    "span too short": (file_bytes({"a": OK | {"shape": [5]}}, b"1234"), r"4 bytes, U8 \[5\] takes 5"),
    "offsets reversed": (file_bytes({"a": entry(4, 0, shape=[4])}, b"1234"), "data_offsets"),
    "negative offset": (file_bytes({"a": entry(-4, 0, shape=[4])}, b"1234"), "data_offsets"),
    "offset is text": (file_bytes({"a": entry("0", 4, shape=[4])}, b"1234"), "data_offsets"),
    "offset is true": (file_bytes({"a": entry(False, True, shape=[1])}, b"1"), "data_offsets"),
    "overlap": (file_bytes({"a": OK, "b": entry(2, 6, shape=[4])}, b"123456"), "'b' starts .* overlaps"),
    "hole at the start": (file_bytes({"a": entry(1, 5, shape=[4])}, b"12345"), "leaves a gap"),
    "hole in between": (file_bytes({"a": OK, "b": entry(5, 6, shape=[1])}, b"123456"), "'b' starts .* gap"),
    "bytes at the end": (file_bytes({"a": OK}, b"12345"), "1 bytes after the last tensor"),
    "truncated": (file_bytes({"a": entry(0, 2**40, shape=[2**40])}, b"1234"), "truncated by 1099511627772 bytes"),
}


@loop(("content", "says"), ATTACKS.values(), ids=ATTACKS)
def test_header_attack(content, says, tmp_path):
    """Catches a check that is missing, a foreign exception, or a message without the file's name and the finding."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        Checkpoint.open(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600
    str(caught.value).encode()


@loop("length", [60, 0x3C20, 0x3C0A])
def test_a_length_that_begins_as_a_page_does(length, tmp_path):
    """The first byte of the header's length is "<", alone or behind white space."""
    header = json.dumps({"x": entry(0, 2, shape=[2])}).encode()
    path = tmp_path / f"{length}.safetensors"
    path.write_bytes(file_bytes(header.ljust(length), b"ab"))
    assert [*read_header(path).tensors] == ["x"]


def test_headers_share_a_budget(tmp_path):
    """Many files that each keep the limit take the memory of all of them."""
    budget = HeaderBudget(num_tensors=3)
    for name in ("one", "two"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"a": u8(1), "b": u8(2)})
    read_header(tmp_path / "one.safetensors", budget)
    with pytest.raises(CheckpointError, match=r"two.safetensors.* hold 4 tensors, at most 3 are read"):
        read_header(tmp_path / "two.safetensors", budget)
    with pytest.raises(CheckpointError, match=r"bytes, at most 10 are read"):
        read_header(tmp_path / "two.safetensors", HeaderBudget(num_bytes=10))


def test_truncated_anywhere(theirs):
    """Catches a length for which a partial download passes as whole."""
    content = theirs.read_bytes()
    for length in [*range(0, len(content), 13), len(content) - 1]:
        theirs.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_header(theirs)


@pytest.mark.parametrize("what", ["length beyond the file", "truncated", "length absurd"])
def test_a_lie_costs_no_memory(what, tmp_path):
    """Catches an allocation of the size that a header claims (up to a TB here)."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(ATTACKS[what][0])
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


SEED = file_bytes(
    {"__metadata__": METADATA, "a": entry(0, 8, shape=[2, 2], dtype="BF16"), "b": entry(8, 10, shape=[2])},
    b"0123456789",
)


@pytest.mark.more
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_fuzz(tmp_path, mutations):
    """Catches any other exception than ours, and any file that we accept and the safetensors library refuses."""
    content = bytearray(SEED)
    for at, value in mutations:
        content[at] = value
    (tmp_path / "x.safetensors").write_bytes(content)
    try:
        ours = read_header(tmp_path / "x.safetensors").tensors
    except CheckpointError:
        return
    theirs = dict(safetensors.deserialize(bytes(content)))
    assert {name: list(info.shape) for name, info in ours.items()} == {name: t["shape"] for name, t in theirs.items()}


def left_behind(folder):
    return sorted(path.name for path in folder.iterdir())


def test_write_streams(tmp_path):
    """Catches a writer that collects all tensors, or all pieces of one, before it writes."""

    def pieces():
        for _ in range(32):
            yield bytes(1_000_000)

    tracemalloc.start()
    write_safetensors(tmp_path / "big.safetensors", {"x": RawTensor("U8", [32_000_000], pieces)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert read_header(tmp_path / "big.safetensors").tensors["x"].nbytes == 32_000_000


def failing(error: BaseException):
    def pieces():
        yield b"12"
        raise error

    return RawTensor("U8", [4], pieces)


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("tensor", "raises", "says"),
    [
        (failing(NO_SPACE), CheckpointError, r"out.safetensors: cannot be written: No space left"),
        (failing(CheckpointError("the source broke")), CheckpointError, "the source broke"),
        (failing(KeyboardInterrupt()), KeyboardInterrupt, None),
        (RawTensor("U8", [4], b"123"), CheckpointError, "tensor x ends at byte 3"),
        (RawTensor("U8", [4], b"12345"), CheckpointError, "tensor x ends at byte 5"),
        (RawTensor("F7", [4], b"1234"), CheckpointError, "dtype 'F7', valid are"),
        (RawTensor("F4", [3], b"12"), CheckpointError, "whole bytes"),
        (RawTensor("U8", [-1], b"1"), CheckpointError, "dimension -1"),
    ],
)
def test_failed_write_leaves_no_trace(tensor, raises, says, tmp_path):
    """Catches half-written files, temporary files that stay, and old files that are lost."""
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(raises, match=says):
        write_safetensors(path, {"x": tensor})
    assert path.read_bytes() == b"old"
    assert left_behind(tmp_path) == ["out.safetensors"]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_disk_full_at_the_end(where, tmp_path, monkeypatch):
    """Catches a success that is reported before the bytes are on disk."""

    def fail(*_):
        raise NO_SPACE

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(CheckpointError, match=r"config.json: cannot be written: No space left on device"):
        write_json(tmp_path / "config.json", {"a": 1})
    assert left_behind(tmp_path) == []


def write_to_full_disk(path):
    with atomic(path) as file:
        full = os.open("/dev/full", os.O_WRONLY)  # refuses every byte
        os.dup2(full, file.fileno())
        os.close(full)
        file.write(b"x" * 100)


def test_real_disk_full(tmp_path):
    """Catches an error that the system reports at flush or close only and that escapes as OSError."""
    with pytest.raises(CheckpointError, match="No space left"):
        write_to_full_disk(tmp_path / "x")
    assert left_behind(tmp_path) == []


def test_unwritable_folder(tmp_path):
    """Catches a bare OSError where the folder cannot be made or written."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file" / "x.json", "/proc/nextn/x.json", "/proc/x.json"):
        with pytest.raises(CheckpointError, match=r"x.json: cannot be written"):
            write_json(type(tmp_path)(path), {})
    with pytest.raises(CheckpointError, match=r"cannot be written"):
        write_json(tmp_path, {})


def test_atomic_replaces_a_link_not_its_target(tmp_path):
    """Catches a write through a link, which would change a file in the hub's cache."""
    (tmp_path / "blob").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    with atomic(tmp_path / "link") as file:
        file.write(b"new")
    assert ((tmp_path / "blob").read_bytes(), (tmp_path / "link").read_bytes()) == (b"old", b"new")


def test_a_file_that_the_library_put_in_its_place(tmp_path, monkeypatch):
    """`save_file` renames one of its own over the file: that one is what must be on disk, for others to read."""
    (tmp_path / "plain").touch()
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    with atomic(tmp_path / "new") as file:
        save_file({"a": torch.ones(2)}, file.name)
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert synced == [(tmp_path / "new").stat().st_ino]


def test_copy_onto_itself(theirs):
    """Catches a rewrite that destroys the file while it still reads from it."""
    before, opened = theirs.read_bytes(), Checkpoint.open(theirs)
    write_safetensors(theirs, {name: opened.raw(name) for name in opened.tensors}, metadata=METADATA)
    assert theirs.read_bytes() == before
