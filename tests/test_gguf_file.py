"""The GGUF container: what is read is what the `gguf` package wrote, and nothing else is believed."""

import os
import struct
import tracemalloc

import gguf
import numpy as np
import pytest

from checkpoints import byte_file, gguf_file
from checkpoints.errors import CheckpointError
from checkpoints.gguf_file import GGML_TYPES, GgufFile
from checkpoints.gguf_writer import GgufWriter

Q = gguf.GGMLQuantizationType


def string(text):
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key_u32(key, value):
    return string(key) + struct.pack("<II", 4, value)


def entry(name="w", shape=(2, 32), code=0, offset=0):
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], code, offset)


WHOLE = (entry(),)


def container(metadata=(), tensors=WHOLE, data=256, version=3, counts=None):
    """A file as bytes, whole by default: one F32 tensor [2, 32]."""
    tensor_count, key_count = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(metadata) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def opened(tmp_path, raw):
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return GgufFile(path)


def write_tensors(path, alignment=None, **tensors):
    """Write arrays given as name=(array, type) with the `gguf` package."""
    writer = gguf.GGUFWriter(path, "test")
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(kind, shape, seed=0):
    """Random stored bytes of a tensor; block scales are ordinary float16 numbers of both signs."""
    rng = np.random.default_rng(seed)
    if kind == Q.Q6_K:
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 210), np.uint8)
        blocks[..., 208:] = rng.standard_normal(blocks.shape[:-1]).astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)
    return gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), kind)


def test_type_sizes_are_those_of_the_reference_package():
    assert {code: (kind.block, kind.nbytes) for code, kind in GGML_TYPES.items()} == {
        kind.value: gguf.GGML_QUANT_SIZES[kind] for kind in Q if kind.value in GGML_TYPES
    }
    assert {code: kind.name for code, kind in GGML_TYPES.items()} == {code: Q(code).name for code in GGML_TYPES}


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q8_0, Q.Q6_K])
def test_every_readable_type_equals_the_reference_decoder_bit_for_bit(tmp_path, monkeypatch, kind, alignment):
    monkeypatch.setattr(gguf_file, "_DECODE_WEIGHTS", 2 * 512)  # several batches of rows, the last one short
    monkeypatch.setattr(byte_file, "_MAX_READ", 1000)  # several reads per batch
    raw = stored(kind, (3, 7, 512))
    write_tensors(tmp_path / "a.gguf", alignment, first=(np.ones(3, np.float32), Q.F32), w=(raw, kind))
    with GgufFile(tmp_path / "a.gguf") as file:
        tensor = file.tensors["w"]
        expected = gguf.quants.dequantize(raw, kind).reshape(21, 512)
        assert (tensor.shape, tensor.rows, tensor.type.name) == ((3, 7, 512), 21, kind.name)
        np.testing.assert_array_equal(file.read(tensor).astype(np.float32).view(np.uint32), expected.view(np.uint32))
        np.testing.assert_array_equal(file.read(tensor, 5, 12), expected[5:12])
        np.testing.assert_array_equal(file.read(file.tensors["first"]), [[1, 1, 1]])


def test_metadata_of_every_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "test")
    values = {}
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        limits = np.iinfo(name)
        for end, value in (("min", int(limits.min)), ("max", int(limits.max))):
            values[f"{name}.{end}"] = value
            getattr(writer, f"add_{name}")(f"{name}.{end}", value)
    values |= {"float32": 1.5, "float64": 0.1, "bool": True, "string": "Grüße", "strings": ["a", "", "ß"]}
    for name in ("float32", "float64", "bool", "string"):
        getattr(writer, f"add_{name}")(name, values[name])
    writer.add_array("strings", values["strings"])
    writer.add_array("numbers", [3, -4])
    writer.add_array("flags", [True, False])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "a.gguf") as file:
        read = dict(file.metadata)
    assert read.pop("general.architecture") == "test"
    numbers, flags, nested = read.pop("numbers"), read.pop("flags"), read.pop("nested")
    assert (numbers.dtype, numbers.tolist()) == (np.int32, [3, -4])
    assert (flags.dtype, flags.tolist()) == (np.bool_, [True, False])
    assert [values.tolist() for values in nested] == [[1, 2], [3]]
    assert read == values
    assert {key: type(value) for key, value in read.items()} == {key: type(value) for key, value in values.items()}


def test_strings_that_are_not_utf8_survive_but_names_must_be(tmp_path):
    with opened(tmp_path, container([string("token") + struct.pack("<I", 8) + string(b"\xff\x00a")])) as file:
        assert file.metadata["token"].encode("utf-8", "surrogateescape") == b"\xff\x00a"
    for name in (b"\xff", b"", b"a\x00b", b"a\nb"):
        with pytest.raises(CheckpointError, match=r"a name must"):
            opened(tmp_path, container([key_u32(name, 1)]))


def test_version_2_is_read_like_version_3(tmp_path):
    with opened(tmp_path, container(version=2)) as file:
        assert file.tensors["w"].shape == (2, 32)


def test_an_empty_container_and_a_last_tensor_without_padding_are_whole(tmp_path):
    with opened(tmp_path, container(tensors=(), data=0)) as file:
        assert file.tensors == {}
    with opened(tmp_path, container(tensors=(entry(shape=(3,)),), data=12)) as file:
        assert file.read(file.tensors["w"]).tolist() == [[0, 0, 0]]


HUGE = (1 << 64) - 1
DAMAGED = {
    "empty": (b"", "not a GGUF file"),
    "wrong magic": (b"GGML" + container()[4:], "not a GGUF file"),
    "only the magic": (b"GGUF", "the file ends at 4"),
    "version 1": (container(version=1), "version 1 is not supported"),
    "version 4": (container(version=4), "version 4 is not supported"),
    "big-endian": (container(version=3 << 24), "big-endian"),
    "absurd tensor count": (container(counts=(HUGE, 0)), "promises 18446744073709551615 items"),
    "absurd key count": (container(counts=(1, 1 << 40)), "promises 1099511627776 items"),
    "one key too many": (container(counts=(1, 2), metadata=[key_u32("a", 1)]), "tensor 0: promises"),
    "key beyond the file": (container([struct.pack("<Q", 1 << 30) + b"a"]), "promises 1073741824 items"),
    "key too long": (container([key_u32("k" * 65536, 1)]), "1 to 65535 bytes"),
    "string beyond the file": (container([string("a") + struct.pack("<IQ", 8, HUGE)]), "'a': promises"),
    "unknown value type": (container([string("a") + struct.pack("<I", 13)]), "unknown value type 13"),
    "bool of 2": (container([string("a") + struct.pack("<IB", 7, 2)]), "a bool must be 0 or 1, got 2"),
    "array beyond the file": (container([string("a") + struct.pack("<IIQ", 9, 4, 1 << 62)]), "'a': promises"),
    "array of unknown type": (container([string("a") + struct.pack("<IIQ", 9, 99, 1)]), "unknown value type 99"),
    "bools of 9": (container([string("a") + struct.pack("<IIQBB", 9, 7, 2, 1, 9)]), "a bool must be 0 or 1, got 9"),
    "nested too deep": (container([string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9]), "nested more"),
    "key twice": (container([key_u32("a", 1), key_u32("a", 1)]), "key 'a': occurs twice"),
    "split": (container([key_u32("split.count", 3)]), "one of 3 parts of a split model"),
    "split into a list": (container([string("split.count") + struct.pack("<IIQII", 9, 4, 2, 1, 1)]), "split model"),
    "alignment 0": (container([key_u32("general.alignment", 0)]), "power of two .* got 0"),
    "alignment 48": (container([key_u32("general.alignment", 48)]), "power of two .* got 48"),
    "alignment 2^31": (container([key_u32("general.alignment", 1 << 31)]), "power of two"),
    "alignment a string": (
        container([string("general.alignment") + struct.pack("<I", 8) + string("32")]),
        "power of two",
    ),
    "tensor twice": (container(tensors=(entry(), entry(offset=256)), data=512), "'w': the name occurs twice"),
    "scalar": (container(tensors=(entry(shape=()),)), "1 to 4 axes, got 0"),
    "five axes": (container(tensors=(entry(shape=(1,) * 5),)), "1 to 4 axes, got 5"),
    "rank 2^32-1": (container(tensors=(string("w") + struct.pack("<I", (1 << 32) - 1),)), "1 to 4 axes"),
    "empty axis": (container(tensors=(entry(shape=(0, 32)),)), "axis of length 0"),
    "absurd shape": (container(tensors=(entry(shape=(HUGE, HUGE, HUGE, HUGE)),)), "it is truncated or damaged"),
    "unknown type": (container(tensors=(entry(code=77),)), "unknown type 77; readable are F32"),
    "removed type": (container(tensors=(entry(code=4),)), "unknown type 4;"),
    "row not of whole blocks": (container(tensors=(entry(shape=(2, 48), code=2),)), "multiple of 32 long, got 48"),
    "offset not aligned": (container(tensors=(entry(offset=16),), data=512), "multiple of the alignment 32, got 16"),
    "offset beyond the file": (container(tensors=(entry(offset=1 << 62),)), "'w': shape .* truncated or damaged"),
    "data cut off": (container(data=255), r"\(2, 32\) of F32 ends at byte 352, but the file at 351"),
    "overlap": (container(tensors=(entry(), entry("v", offset=224)), data=512), "'v': overlaps tensor 'w'"),
    "same place": (container(tensors=(entry(), entry("v"))), "overlaps tensor"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_refused_with_what_is_wrong(tmp_path, case):
    raw, problem = DAMAGED[case]
    with pytest.raises(CheckpointError, match=problem) as caught:
        opened(tmp_path, raw)
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_every_truncation_of_the_header_and_the_data_is_refused(tmp_path):
    raw = container([key_u32("a", 1), string("b") + struct.pack("<I", 8) + string("text")])
    with opened(tmp_path, raw) as file:
        assert file.metadata == {"a": 1, "b": "text"}
    for length in range(len(raw)):
        with pytest.raises(CheckpointError):
            opened(tmp_path, raw[:length])


def test_refused_files_are_closed(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError):
        opened(tmp_path, container(data=1))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_is_not_a_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none.gguf", tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="no such file"):
            GgufFile(path)


def sparse(path, raw, size):
    path.write_bytes(raw)
    os.truncate(path, size)
    return path


def test_promises_that_a_huge_file_could_keep_are_refused_before_memory_is_taken(tmp_path):
    promise = container([string("a") + struct.pack("<IIQ", 9, 0, 1 << 32)])
    path = sparse(tmp_path / "huge.gguf", promise, 8 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="headers beyond 67108864 bytes are refused"):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_reading_touches_only_the_bytes_asked_for(tmp_path, monkeypatch):
    rows, width = 1 << 20, 4096
    tensors = (entry("big", (rows, width), 30), entry("small", (8,), 0, rows * width * 2))
    path = sparse(tmp_path / "large.gguf", container(tensors=tensors), (rows * width * 2) + (1 << 12))
    taken = []
    preadv = os.preadv

    def counting(descriptor, buffers, offset):
        count = preadv(descriptor, buffers, offset)
        taken.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    with GgufFile(path) as file:
        assert sum(taken) <= 1 << 20  # the header, in one piece
        taken.clear()
        assert file.read(file.tensors["big"], rows - 3, rows).shape == (3, width)
        assert file.read(file.tensors["small"]).shape == (1, 8)
    assert taken == [3 * width * 2, 32]


def test_a_file_that_shrinks_or_is_closed_is_an_error_and_not_a_crash(tmp_path):
    file = opened(tmp_path, container())
    os.truncate(tmp_path / "model.gguf", 300)
    with pytest.raises(CheckpointError, match="ends inside tensor 'w'; it was longer when opened"):
        file.read(file.tensors["w"])
    file.close()
    file.close()
    with pytest.raises(CheckpointError, match=r"is closed, so tensor 'w' cannot be read"):
        file.read(file.tensors["w"])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("kind", "scale"), [(Q.Q4_0, 0), (Q.Q8_0, 0), (Q.Q6_K, 208)])
def test_block_scales_that_are_not_finite_are_refused(tmp_path, kind, scale, bad):
    raw = stored(kind, (3, 512))
    block = gguf.GGML_QUANT_SIZES[kind][1]
    raw[1, block + scale : block + scale + 2] = np.array([bad], np.float16).view(np.uint8)
    write_tensors(tmp_path / "a.gguf", w=(raw, kind))
    with GgufFile(tmp_path / "a.gguf") as file:
        assert np.isfinite(file.read(file.tensors["w"], 2, 3)).all()
        with pytest.raises(CheckpointError, match=r"tensor 'w', from row 0: .*"):
            file.read(file.tensors["w"])


def test_other_types_are_known_but_not_decoded(tmp_path):
    write_tensors(tmp_path / "a.gguf", w=(stored(Q.Q5_1, (2, 64)), Q.Q5_1))
    with GgufFile(tmp_path / "a.gguf") as file:
        with pytest.raises(CheckpointError, match=r"'w' is of type Q5_1, which is not supported; requantise .* Q4_0"):
            file.read(file.tensors["w"])
        with pytest.raises(CheckpointError, match="of type Q5_1, expected Q4_0"):
            file.read_words(file.tensors["w"])


def test_what_is_written_the_reference_package_reads(tmp_path):
    values = {
        "general.architecture": "test",
        "general.file_type": 0,
        "negative": -5,
        "wide": 1 << 40,
        "lowest": -(1 << 40),
        "real": 0.25,
        "flag": True,
        "numbers": [1, -2],
        "reals": [0.5, 2.0],
        "flags": [True, False],
        "words": ["a", "ß"],
        "nested": [[1], [2, 3]],
        "exact": np.array([1, 2], np.uint16),
        "none": [],
    }
    rng = np.random.default_rng(0)
    arrays = {"a": rng.standard_normal((3, 5)).astype(np.float32), "b": rng.standard_normal(7).astype(np.float16)}
    with (tmp_path / "a.gguf").open("wb") as target:
        writer = GgufWriter(target, dict(values), {name: array.shape for name, array in arrays.items()})
        for name in ("b", "a"):
            writer.add(name, {"a": "F32", "b": "F16"}[name], arrays[name])
        writer.metadata["general.file_type"] = 7
        writer.finish()
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert {tensor.name: tensor.tensor_type for tensor in reader.tensors} == {"a": Q.F32, "b": Q.F16}
    for tensor in reader.tensors:
        np.testing.assert_array_equal(tensor.data, arrays[tensor.name])
        assert tensor.data_offset % 32 == 0
    kinds = {key: [int(kind) for kind in field.types] for key, field in reader.fields.items()}
    kind = gguf.GGUFValueType
    assert kinds["general.file_type"] == [kind.UINT32]
    assert kinds["negative"] == [kind.INT32]
    assert kinds["wide"] == [kind.UINT64]
    assert kinds["lowest"] == [kind.INT64]
    assert kinds["real"] == [kind.FLOAT32]
    assert kinds["flag"] == [kind.BOOL]
    assert kinds["numbers"] == [kind.ARRAY, kind.INT32]
    assert kinds["exact"] == [kind.ARRAY, kind.UINT16]
    with GgufFile(tmp_path / "a.gguf") as file:
        read = {key: _plain(value) for key, value in file.metadata.items()}
    assert read == {key: _plain(value) for key, value in values.items()} | {"general.file_type": 7}


def _plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("value", [None, {"a": 1}, b"raw", ["a", 1], 1j, np.float16(1), [1 << 70]])
def test_metadata_that_the_format_cannot_hold_is_refused(tmp_path, value):
    with (tmp_path / "a.gguf").open("wb") as target, pytest.raises(TypeError, match="metadata"):
        GgufWriter(target, {"key": value}, {})
