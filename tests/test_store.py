"""Converted checkpoints: exact bits, whole or not at all, and nothing damaged passes for data."""

import contextlib
import gc
import hashlib
import json
import logging
import pathlib
import random
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from checkpoints import CheckpointError, TensorInfo, open_checkpoint, orbax_item
from checkpoints.orbax_item import arrays_of, content_hash, save_item
from checkpoints.q4_blocks import Q4Codes, unpack_words
from checkpoints.store import open_store
from checkpoints.store_manifest import LARGE_PROJECTIONS, make_header
from checkpoints.store_writer import StoreWriter, draft_of
from gdn_jax.weights import TABLE
from tests.support import gguf_files

TEXT = gguf_files.config(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
LARGE = tuple(f"layers.0.linear_attn.{name}" for name in LARGE_PROJECTIONS)
TEXTS = {"tokenizer.json": b"{}", "chat_template.jinja": "é\n".encode()}
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def random_values(seed=0, tier="q4", text=TEXT):
    """A whole model of arbitrary bit patterns, NaNs and infinities included; dtypes by turns."""
    rng = np.random.default_rng(seed)
    values = {}
    for number, (name, shape) in enumerate(gguf_files.shapes(text).items()):
        if tier == "q4" and name in LARGE:
            scales = rng.standard_normal((shape[0], shape[1] // 32)).astype(np.float16)
            values[name] = Q4Codes(rng.integers(-8, 8, shape, np.int8), scales)
        else:
            dtype = DTYPES[number % 3]
            values[name] = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    return values


def header(tier="q4", text=TEXT, **provenance):
    parts, quantiser = ("gdn", "absmax") if tier == "q4" else (None, None)
    return make_header(tier=tier, q4_parts=parts, quantiser=quantiser, config=text, provenance=provenance, texts=TEXTS)


def items(values):
    """One item per layer, and one for the rest at the end."""
    groups = {"layers.0": [], "layers.1": [], "model": []}
    for name in sorted(values):
        group = next((group for group in groups if name.startswith(f"{group}.")), "model")
        groups[group].append(name)
    return groups


def info(value):
    return (
        TensorInfo(value.codes.shape, "Q4_0")
        if isinstance(value, Q4Codes)
        else TensorInfo(value.shape, value.dtype.name)
    )


def write(path, values, head=None, *, resumable=False, fail_at=None):
    """Write a store; with `fail_at`, stop inside that item (by number). Returns the items that were taken over."""
    kept = []
    with StoreWriter(path, head or header(), resumable=resumable) as writer:
        for number, (item, names) in enumerate(items(values).items()):
            if writer.keep(item, {name: info(values[name]) for name in names}):
                kept.append(item)
                continue
            with writer.item(item) as building:
                for name in names:
                    building.put(name, values[name], {"max_error": 0.5} if name in LARGE else None)
                    if number == fail_at:
                        raise KeyboardInterrupt
        writer.finish(TEXTS)
    return kept


def same(value, expected):
    if isinstance(expected, Q4Codes):
        return all(same(a, b) for a, b in zip(value, expected, strict=True))
    return (value.dtype, value.shape, value.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def read(store, name):
    return store.read_q4(name) if store.info(name).dtype == "Q4_0" else store.read(name)


def assert_holds(path, values):
    with open_store(path) as store:
        assert store.names() == tuple(sorted(values))
        for name, expected in values.items():
            assert store.info(name) == info(expected)
            assert same(read(store, name), expected)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One store that tests copy, and must not change."""
    path = tmp_path_factory.mktemp("store") / "model"
    write(path, random_values())
    return path


def damaged(whole, tmp_path):
    return pathlib.Path(shutil.copytree(whole, tmp_path / "model"))


# --- what goes in comes out


@pytest.mark.parametrize("tier", ["f32", "q4"])
def test_every_tensor_comes_back_with_its_bits(tmp_path, tier):
    values = random_values(tier=tier)
    write(tmp_path / "model", values, header(tier))
    assert_holds(tmp_path / "model", values)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert sorted(entry.name for entry in (tmp_path / "model").iterdir()) == sorted(["items", "manifest.json", *TEXTS])
    assert sorted(entry.name for entry in (tmp_path / "model/items").iterdir()) == ["layers.0", "layers.1", "model"]


def test_it_opens_as_a_checkpoint_and_says_what_it_is(whole):
    with open_checkpoint(whole) as store:
        assert store.config == TEXT
        assert store.skipped == ()
        assert (store.tier, store.q4_parts, store.quantiser) == ("q4", "gdn", "absmax")
        assert store.source == str(whole)
        assert store.records[LARGE[0]].quantisation == {"max_error": 0.5}


def test_arrays_are_the_callers_own(whole):
    with open_store(whole) as store:
        first, again = store.read("norm.weight"), store.read("norm.weight")
        first[:] = 0
        assert first.flags.writeable
        assert first.flags.c_contiguous
        assert not same(first, again)


def test_q4_is_dequantised_exactly_on_request(whole):
    codes, scales = random_values()[LARGE[2]]
    with open_store(whole) as store:
        expected = codes * np.repeat(scales.astype(np.float32), 32, axis=1)
        assert same(store.read(LARGE[2]), expected)
        with pytest.raises(CheckpointError, match=r"'norm.weight' is stored as float\w+, not in 4 bits"):
            store.read_q4("norm.weight")


def test_q4_takes_four_and_a_half_bits_per_weight(tmp_path):
    codes = Q4Codes(np.ones((512, 4096), np.int8), np.ones((512, 128), np.float16))
    save_item(tmp_path / "item", {"w": arrays_of(codes)})
    size = sum(file.stat().st_size for file in (tmp_path / "item").rglob("*") if file.is_file())
    assert 0 <= size - codes.codes.size * 4.5 / 8 < 5000


def test_large_arrays_are_stored_and_read_in_blocks_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_item, "_BLOCK_BYTES", 300)  # less than a row of some, more than all of others
    write(tmp_path / "model", random_values())
    assert_holds(tmp_path / "model", random_values())
    monkeypatch.undo()
    with open_store(tmp_path / "model") as store, pytest.raises(CheckpointError, match=r"must be .*, got rows0: float"):
        store.read("embed_tokens.weight")


def test_names_that_are_not_there_and_closed_stores_are_errors(whole):
    store = open_store(whole)
    for method in (store.info, store.read, store.read_q4):
        with pytest.raises(CheckpointError, match=r"no tensor 'norm' among its \d+ canonical names"):
            method("norm")
    store.close()
    store.close()
    with pytest.raises(CheckpointError, match="is closed"):
        store.read("norm.weight")


def test_reading_and_writing_are_quiet(tmp_path, caplog, capfd):
    with caplog.at_level(logging.DEBUG, logger="absl"):
        write(tmp_path / "model", random_values())
        assert_holds(tmp_path / "model", random_values())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("absl").filters == []


def test_importing_the_package_loads_neither_orbax_nor_jax():
    program = "import sys, checkpoints.store_writer; print([m for m in ('jax', 'orbax') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", TEXTS)
def test_text_files_lie_beside_the_manifest_and_are_checked_when_it_is_opened(whole, tmp_path, name):
    path = damaged(whole, tmp_path)
    assert (path / name).read_bytes() == TEXTS[name]
    (path / name).write_bytes(TEXTS[name] + b" ")
    with pytest.raises(CheckpointError, match=f"{name}: does not have the recorded sha256: damaged or edited"):
        open_store(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: no such file"):
        open_checkpoint(path)


def test_experts_that_share_a_tensor_can_be_4_bit(tmp_path):
    rng = np.random.default_rng(0)
    codes = Q4Codes(rng.integers(-8, 8, (3, 4, 64), np.int8), rng.standard_normal((3, 4, 2)).astype(np.float16))
    text = gguf_files.moe_config(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    values = random_values(text=text)
    name = "layers.1.mlp.experts.down_proj"
    values = {n: v for n, v in values.items() if not n.startswith("layers.1.mlp.experts")} | {name: codes}
    write(tmp_path / "model", values, header(text=text))
    with open_store(tmp_path / "model") as store:
        assert store.info(name) == TensorInfo((3, 4, 64), "Q4_0")
        assert same(store.read_q4(name), codes)
        words, scales = store.read_words(name)
        assert same(Q4Codes(unpack_words(words), scales), codes)
        wide = codes.codes * np.repeat(codes.scales.astype(np.float32), 32, axis=-1)
        assert same(store.read(name), wide)


def test_the_large_projections_are_those_of_the_weights():
    assert {row.name for row in TABLE if row.is_large} == set(LARGE_PROJECTIONS)


# --- whole or not at all


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    for fail_at in range(3):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "model", random_values(), fail_at=fail_at)
        assert list(tmp_path.iterdir()) == []


def test_a_resumed_write_keeps_finished_items_and_gives_the_same_bits(tmp_path, whole):
    for fail_at in range(3):
        path = tmp_path / f"model{fail_at}"
        with pytest.raises(KeyboardInterrupt):
            write(path, random_values(), resumable=True, fail_at=fail_at)
        assert not path.exists()
        with pytest.raises(CheckpointError, match=r"unfinished conversion is there or running; resume it, or remove"):
            write(path, random_values())
        assert write(path, random_values(), resumable=True) == ["layers.0", "layers.1", "model"][:fail_at]
        assert (path / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()
        assert_holds(path, random_values())
        assert not draft_of(path).exists()


def leave_draft(path, fail_at=2):
    with pytest.raises(KeyboardInterrupt):
        write(path, random_values(), resumable=True, fail_at=fail_at)
    return draft_of(path)


def test_a_write_is_resumed_from_wherever_the_machine_stopped(tmp_path, whole):
    """The journal is cut at every kind of place, and an item is half written."""
    draft = leave_draft(tmp_path / "draft")
    journal = (draft / "journal.jsonl").read_bytes()
    first, second, _ = (len(line) for line in journal.splitlines(keepends=True))
    cuts = {0: 0, 1: 0, first - 1: 0, first: 0, first + 9: 0, first + second: 1, len(journal) - 2: 1, len(journal): 2}
    for cut, count in cuts.items():
        path = tmp_path / f"model{cut}"
        shutil.copytree(draft, draft_of(path))
        (draft_of(path) / "journal.jsonl").write_bytes(journal[:cut])
        leftover = draft_of(path) / "items" / "model.orbax-checkpoint-tmp"
        leftover.mkdir()
        (leftover / "half").write_bytes(b"x")
        assert len(write(path, random_values(), resumable=True)) == count
        assert (path / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()
        assert sorted(entry.name for entry in (path / "items").iterdir()) == ["layers.0", "layers.1", "model"]
    shutil.rmtree(draft)
    draft.mkdir()  # stopped before anything was in it
    assert write(tmp_path / "draft", random_values(), resumable=True) == []


def test_a_write_is_resumed_when_only_the_rename_was_missing(tmp_path, whole):
    path = tmp_path / "model"
    draft = leave_draft(path)
    (draft / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
    assert len(write(path, random_values(), resumable=True)) == 2
    assert_holds(path, random_values())


def test_items_that_no_longer_have_their_hashes_are_written_again(tmp_path, whole):
    path = tmp_path / "model"
    item = leave_draft(path) / "items" / "layers.0"
    largest = max((file for file in item.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    flip(largest, largest.stat().st_size // 2)
    assert write(path, random_values(), resumable=True) == ["layers.1"]
    assert (path / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()
    assert_holds(path, random_values())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (header("f32"), r"differs in q4_parts, quantiser, tier \(q4_parts is 'gdn' there and None here\)"),
        (header(source="other"), "differs in provenance.source"),
        (header(text=TEXT | {"rms_norm_eps": 1e-5}), "differs in config"),
    ],
)
def test_a_draft_of_another_conversion_is_refused_and_kept(tmp_path, head, message):
    draft = leave_draft(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        StoreWriter(tmp_path / "model", head, resumable=True)
    assert write(tmp_path / "model", random_values(), resumable=True) == ["layers.0", "layers.1"]
    assert not draft.exists()


def test_a_draft_in_use_is_refused(tmp_path):
    with StoreWriter(tmp_path / "model", header(), resumable=True):
        with pytest.raises(CheckpointError, match="another process is working on this conversion"):
            StoreWriter(tmp_path / "model", header(), resumable=True)
        with pytest.raises(CheckpointError, match="there or running"):
            StoreWriter(tmp_path / "model", header())


def test_places_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        for resumable in (False, True):
            with pytest.raises(CheckpointError, match=f"{name}: exists already; remove it first"):
                StoreWriter(tmp_path / name, header(), resumable=resumable)
    with pytest.raises(CheckpointError, match=r"none/model: the directory .*none does not exist"):
        StoreWriter(tmp_path / "none" / "model", header())
    with pytest.raises(CheckpointError, match="file/model: the directory"):
        StoreWriter(tmp_path / "file" / "model", header())
    with pytest.raises(CheckpointError, match="/proc/model: cannot be written"):  # refuses even the superuser
        StoreWriter("/proc/model", header())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("layers.0.linear_attn.A_log"), "'layers.0.linear_attn.A_log' is missing"),
        (lambda v: v.update({LARGE[1]: np.zeros((192, 32), np.float32)}), "must be Q4_0 in tier q4, got float32"),
        (lambda v: v.update({"norm.weight": np.zeros(32)}), "'norm.weight': dtype must be one of .* got float64"),
        (lambda v: v.update({"mtp.fc.weight": np.zeros(32, np.float32)}), "'mtp.fc.weight' has no place"),
        (
            lambda v: v.update({LARGE[0]: Q4Codes(np.full((224, 32), 8, np.int8), np.zeros((224, 1), np.float16))}),
            "codes must lie in -8",
        ),
        (
            lambda v: v.update(
                {LARGE[0]: Q4Codes(np.zeros((224, 32), np.int8), np.full((224, 1), np.nan, np.float16))}
            ),
            "scales must be finite",
        ),
    ],
)
def test_what_is_no_whole_model_of_its_tier_is_not_written(tmp_path, change, message):
    values = random_values()
    change(values)
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "model", values)
    assert list(tmp_path.iterdir()) == []


# --- damage


def flip(file, position, mask=0x10):
    data = bytearray(file.read_bytes())
    data[position] ^= mask
    file.write_bytes(data)


def files_of(path):
    return sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())


def refused_or_same(path, values, file):
    """Whether the store was refused: the alternative is that every tensor that `file` may concern is what it was."""
    with contextlib.suppress(CheckpointError), open_checkpoint(path) as store:
        assert store.config == TEXT
        assert store.names() == tuple(sorted(values))
        for name, expected in values.items():
            if store.records[name].item in file.parts or len(file.parts) == 1:
                assert same(read(store, name), expected)
        return False
    return True


@pytest.mark.slow
def test_a_flipped_bit_in_any_file_is_refused_or_harmless(whole, tmp_path):
    """Positions in every file, its ends included; the data files must never pass with a bit flipped inside a tensor."""
    draw, values = random.Random(0), random_values()
    path = damaged(whole, tmp_path)
    refused = 0
    for name in files_of(whole):
        size = (whole / name).stat().st_size
        for position in {0, size - 1, *(draw.randrange(size) for _ in range(2))}:
            flip(path / name, position, 1 << draw.randrange(8))
            refused += refused_or_same(path, values, name)
            shutil.copy(whole / name, path / name)
    assert refused > 30


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "emptied", "removed", "a directory", "another's"])
def test_files_that_are_cut_missing_or_exchanged_are_refused_or_harmless(whole, tmp_path, how):
    values = random_values()
    path = damaged(whole, tmp_path)
    refused = 0
    for name in files_of(whole):
        data = (whole / name).read_bytes()
        (path / name).unlink()
        if how == "a directory":
            (path / name).mkdir()
        elif how != "removed":
            changed = {"cut": data[: len(data) // 2], "emptied": b"", "another's": data[::-1]}[how]
            (path / name).write_bytes(changed)
        refused += refused_or_same(path, values, name)
        (path / name).rmdir() if how == "a directory" else (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(data)
    assert refused > 10  # per item at least its index, its manifest, its tree and its data


def test_items_of_another_model_in_place_of_ones_own_are_refused(whole, tmp_path):
    write(tmp_path / "other", random_values(seed=1))
    path = damaged(whole, tmp_path)
    shutil.rmtree(path / "items/model")
    shutil.copytree(tmp_path / "other/items/model", path / "items/model")
    with open_store(path) as store:
        store.read(LARGE[0])
        with pytest.raises(CheckpointError, match=r"items/model: tensor 'norm.weight' is damaged: .* recorded sha256"):
            store.read("norm.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "'norm.weight' is missing"),
        (lambda t: t.update(more=t["norm.weight"]), "'more' is extra"),
        (
            lambda t: t.update({"norm.weight": np.zeros((32, 1), np.float32)}),
            r"must be \w+ \[32\], got float32 \[32, 1\]",
        ),
        (lambda t: t.update({"norm.weight": np.zeros(32, np.float64)}), r"must be \w+ \[32\], got float64 \[32\]"),
        (lambda t: t.update({"norm.weight": {"codes": np.zeros(4, np.uint32)}}), "got codes: uint32"),
    ],
)
def test_items_that_hold_something_else_are_refused_before_reading(whole, tmp_path, change, message):
    import orbax.checkpoint as ocp

    path = damaged(whole, tmp_path)
    tree = {name: random_values()[name] for name in ("embed_tokens.weight", "lm_head.weight", "norm.weight")}
    change(tree)
    shutil.rmtree(path / "items/model")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / "items/model", tree)
    with open_store(path) as store, pytest.raises(CheckpointError, match=message):
        store.read("embed_tokens.weight")


@pytest.mark.parametrize("field", ["chunks", "shape"])
def test_absurd_sizes_inside_an_item_are_refused_before_they_take_memory(whole, tmp_path, field):
    import orbax.checkpoint as ocp

    path = damaged(whole, tmp_path)
    tree = {name: random_values()[name] for name in ("embed_tokens.weight", "lm_head.weight", "norm.weight")}
    shutil.rmtree(path / "items/model")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path / "items/model", tree)
    with open_store(path) as store:
        assert same(store.read("norm.weight"), tree["norm.weight"])  # the plain layout of Orbax is read as well
    file = path / "items/model/norm.weight/.zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: [1 << 45]}))
    with open_store(path) as store, pytest.raises(CheckpointError, match=r"norm.weight"):
        store.read("norm.weight")


def test_an_item_of_other_types_is_refused_without_a_trace(whole, tmp_path):
    """One array of a type that is not read, among others that are: nothing may be started and left."""
    path = damaged(whole, tmp_path)
    file = path / "items/model/_METADATA"
    file.write_text(file.read_text().replace("np.ndarray", "jax.Array", 1))
    with open_store(path) as store, pytest.raises(CheckpointError, match="is not a numpy array"):
        store.read("norm.weight")
    gc.collect()


# --- manifests


def reseal(path, change):
    """Rewrite the manifest with `change`, and with a seal that fits."""
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    seal = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": seal}))


def record(name, **changes):
    return lambda body: body["tensors"][name].update(changes)


def record_of_text(name, sha256):
    return lambda body: body["texts"].update({name: sha256})


MANIFESTS = {
    "version": (lambda body: body.update(version=1), "written in version 1 of the format, .* reads version 2"),
    "version of another kind": (lambda body: body.update(version=True), "written in version True"),
    "format": (lambda body: body.update(format="x"), "not the manifest of a converted checkpoint"),
    "no tensors": (lambda body: body.update(tensors={}), "'layers.0.linear_attn.A_log' is missing"),
    "tensors a list": (lambda body: body.update(tensors=[]), "expected the keys"),
    "more": (lambda body: body.update(more=1), "expected the keys"),
    "tier": (lambda body: body.update(tier="q2"), "tier must be one of f32, q4, got 'q2'"),
    "other tier": (lambda body: body.update(tier="f32"), "is Q4_0 in a checkpoint of tier f32"),
    "parts": (lambda body: body.update(q4_parts="most"), "q4_parts must be one of all, gdn, got 'most'"),
    "no parts": (lambda body: body.update(q4_parts=None), "q4_parts must be one of all, gdn, got None"),
    "all parts": (lambda body: body.update(q4_parts="all"), "must be Q4_0 in tier q4, got"),
    "text of another name": (
        lambda body: body["texts"].update({"../x": "0" * 64}),
        "texts must have keys among tokenizer.json, .*got",
    ),
    "texts a list": (lambda body: body.update(texts=["vocab.json"]), "texts must have keys among"),
    "text without a hash": (record_of_text("vocab.json", 1), "texts: vocab.json must be 64 hexadecimal digits, got 1"),
    "text missing": (record_of_text("vocab.json", "0" * 64), "vocab.json: no such file"),
    "text of another hash": (record_of_text("tokenizer.json", "0" * 64), "does not have the recorded sha256"),
    "half a tier": (record(LARGE[1], dtype="float32"), "must be Q4_0 in tier q4, got float32"),
    "config": (lambda body: body.update(config=[]), "must be a JSON object"),
    "no geometry": (lambda body: body["config"].pop("linear_num_key_heads"), "lacks 'linear_num_key_heads'"),
    "geometry": (
        lambda body: body["config"].update(linear_key_head_dim=16),
        r"must have shape \[256, 1, 4\], got \[224, 1, 4\]",
    ),
    "layers": (
        lambda body: body["config"].update(num_hidden_layers=1, layer_types=["linear_attention"]),
        "has no place",
    ),
    "more layers": (
        lambda body: body["config"].update(num_hidden_layers=3, layer_types=["linear_attention"] * 3),
        "has no place|is missing",
    ),
    "unknown tensor": (lambda body: body["tensors"].update(x=body["tensors"]["norm.weight"]), "'x' has no place"),
    "traversal": (record("norm.weight", item="../model"), "item must be a plain directory name"),
    "absolute": (record("norm.weight", item="/etc"), "item must be a plain directory name"),
    "hidden": (record("norm.weight", item=".."), "item must be a plain directory name"),
    "item missing": (record("norm.weight", item="elsewhere"), "items/elsewhere: no such directory"),
    "hash": (record("norm.weight", sha256="0"), "sha256 must be 64 hexadecimal digits"),
    "shape": (record("norm.weight", shape=[-1]), "shape must be at most 8 positive integers"),
    "shape of floats": (record("norm.weight", shape=[32.0]), "shape must be"),
    "dtype": (record("norm.weight", dtype="int8"), "dtype must be Q4_0 or one of"),
    "dtype no string": (record("norm.weight", dtype=["float32"]), "dtype must be"),
    "q4 vector": (record("norm.weight", dtype="Q4_0"), "Q4_0 needs shape"),
    "record": (lambda body: body["tensors"].update({"norm.weight": 1}), "a record must have the keys"),
    "record with more": (record("norm.weight", offset=1), "a record must have the keys"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests_that_lie_are_refused_when_opened(whole, tmp_path, case):
    path = damaged(whole, tmp_path)
    change, message = MANIFESTS[case]
    reseal(path, change)
    with pytest.raises(CheckpointError, match=message):
        open_store(path)


def test_an_absurd_shape_is_refused_without_allocating(whole, tmp_path):
    path = damaged(whole, tmp_path)
    reseal(path, record("embed_tokens.weight", shape=[1 << 60, 32]))
    with pytest.raises(CheckpointError, match="shape must have at most 274877906944 elements"):
        open_store(path)
    reseal(path, record("embed_tokens.weight", shape=[1 << 33, 32]))
    with open_store(path) as store, pytest.raises(CheckpointError, match=r"got \w+ \[24, 32\]"):
        store.read("embed_tokens.weight")


def test_an_edited_manifest_and_none_at_all_are_refused(whole, tmp_path):
    path = damaged(whole, tmp_path)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("1e-06", "1e-05"))
    with pytest.raises(CheckpointError, match="does not match its sha256: damaged or edited"):
        open_store(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a converted checkpoint, or an unfinished one"):
        open_store(path)
    with pytest.raises(CheckpointError, match="supported"):
        open_checkpoint(path)


def test_scales_that_are_not_finite_are_refused_even_with_a_fitting_hash(whole, tmp_path):
    path, values = damaged(whole, tmp_path), random_values()
    arrays = {name: arrays_of(values[name]) for name in items(values)["layers.0"]}
    arrays[LARGE[0]]["scales"][0, 0] = np.inf
    shutil.rmtree(path / "items/layers.0")
    save_item(path / "items/layers.0", arrays)
    reseal(path, record(LARGE[0], sha256=content_hash(arrays[LARGE[0]])))
    with open_store(path) as store, pytest.raises(CheckpointError, match="scales must be finite"):
        store.read_q4(LARGE[0])
