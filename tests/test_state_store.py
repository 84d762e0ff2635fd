"""Sequences on disk: exact resumption, old or new but whole, and nothing wrong or damaged passes for a state."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from checkpoints import array_store
from checkpoints.sealed_json import encode_sealed
from gdn_jax import state_store
from gdn_jax.decoder.generate import Rows
from gdn_jax.decoder.state import init_decoder_state
from gdn_jax.errors import CheckpointError, StateMismatchError
from gdn_jax.fingerprints import _sums
from tests.support import cases, decoders

ROOT = pathlib.Path(__file__).parent.parent
CFG = decoders.SMALL
GDN = cases.SMALL
CAPACITY = 16
POSITION = (7, 0, 3)
ID = "these weights"
ATTENTION = dataclasses.replace(CFG, layer_types=("full_attention",), mlp_types=("dense",), moe=None, gdn=None)
WIDTH_ONE = dataclasses.replace(
    CFG,
    layer_types=("linear_attention",),
    mlp_types=("dense",),
    moe=None,
    gdn=dataclasses.replace(CFG.gdn, conv_width=1),
)


def filled(state, seed=0):
    """The state with numbers everywhere; what lies behind the positions is NaN."""
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(leaf.dtype)), state)
    if isinstance(state, gdn.GdnState):
        return state
    position = np.asarray(POSITION[: state.batch], np.int32)
    unused = np.arange(state.capacity)[None] >= position[:, None]
    spoilt = {
        name: jnp.where(unused[None, :, :, None, None], jnp.nan, getattr(state, name)) for name in ("keys", "values")
    }
    return dataclasses.replace(state, **spoilt, position=jnp.asarray(position))


def decoder_state(cfg=CFG, batch=3, capacity=CAPACITY, dtype="float32", seed=0):
    return filled(init_decoder_state(cfg, batch=batch, capacity=capacity, kv_dtype=dtype), seed)


def rows(seed=0):
    rng = np.random.default_rng(seed)
    state = decoder_state(seed=seed)
    seen = jnp.asarray(rng.random((3, CFG.vocab)) < 0.3)
    return Rows(state, jnp.asarray([1, 95, 0], jnp.int32), seen)


def logical(state):
    """The state as numpy, with zeros behind the positions."""
    if isinstance(state, gdn.GdnState):
        return jax.tree.map(np.asarray, state)
    inner = state.state if isinstance(state, Rows) else state
    used = np.arange(inner.capacity)[None] < np.asarray(inner.position)[:, None]
    cut = {
        name: np.where(used[None, :, :, None, None], np.asarray(getattr(inner, name)), np.zeros((), inner.keys.dtype))
        for name in ("keys", "values")
    }
    inner = jax.tree.map(np.asarray, dataclasses.replace(inner, **cut))
    return dataclasses.replace(jax.tree.map(np.asarray, state), state=inner) if isinstance(state, Rows) else inner


def assert_same(got, want):
    assert type(got) is type(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


STATES = {
    "gdn": (lambda: filled(gdn.init_state(GDN, layers=2, batch=3)), GDN),
    "hybrid": (decoder_state, CFG),
    "bfloat16": (lambda: decoder_state(dtype="bfloat16"), CFG),
    "attention alone": (lambda: decoder_state(ATTENTION), ATTENTION),
    "no history": (lambda: decoder_state(WIDTH_ONE), WIDTH_ONE),
    "at the beginning": (lambda: init_decoder_state(CFG, batch=2, capacity=4), CFG),
    "full": (lambda: decoder_state(capacity=max(POSITION)), CFG),
    "rows": (rows, CFG),
}


# What goes in comes out


@pytest.mark.parametrize("kind", STATES)
def test_a_state_comes_back_with_its_bits(tmp_path, kind):
    make, cfg = STATES[kind]
    state = make()
    gdn.save_state(tmp_path / "state", state, cfg=cfg, weights_id=ID)
    got = gdn.load_state(tmp_path / "state", cfg=cfg, weights_id=ID)
    assert_same(got, logical(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    # Again, from what was loaded: nothing has changed on the way.
    gdn.save_state(str(tmp_path / "again"), got, cfg=cfg, weights_id=ID)
    assert_same(gdn.load_state(tmp_path / "again", cfg=cfg, weights_id=ID), got)


def test_only_the_used_slots_are_stored(tmp_path):
    state = decoder_state(capacity=4096)
    gdn.save_state(tmp_path / "state", state, cfg=CFG, weights_id=ID)
    used = 2 * state.keys[:, :, : max(POSITION)].nbytes + state.gdn.S.nbytes + state.gdn.conv_hist.nbytes
    stored = sum(file.stat().st_size for file in (tmp_path / "state").rglob("*") if file.is_file())
    assert used < stored < used + 10_000 < state.keys.nbytes


@pytest.mark.parametrize("capacity", [7, 8, 300, 1000])
@pytest.mark.parametrize("make", [decoder_state, rows])
def test_a_state_can_be_given_other_room(tmp_path, capacity, make):
    state = make()
    gdn.save_state(tmp_path / "state", state, cfg=CFG, weights_id=ID)
    got = gdn.load_state(tmp_path / "state", cfg=CFG, weights_id=ID, capacity=capacity)
    assert got.capacity == capacity
    assert_same(gdn.resize(got, capacity=CAPACITY), logical(state))


def test_less_room_than_the_tokens_need_is_refused(tmp_path):
    gdn.save_state(tmp_path / "state", decoder_state(), cfg=CFG, weights_id=ID)
    with pytest.raises(StateMismatchError, match="holds up to 7 tokens of a sequence, and the capacity is to be 6"):
        gdn.load_state(tmp_path / "state", cfg=CFG, weights_id=ID, capacity=6)


def test_saving_is_quiet(tmp_path, capfd):
    gdn.save_state(tmp_path / "state", decoder_state(), cfg=CFG, weights_id=ID)
    gdn.load_state(tmp_path / "state", cfg=CFG, weights_id=ID)
    assert capfd.readouterr() == ("", "")


# Resumption

TINY = dataclasses.replace(CFG, layer_types=("linear_attention", "full_attention"), mlp_types=("dense",) * 2, moe=None)


@functools.cache
def model(label="tests/tiny", tier="f32"):
    return gdn.Decoder(cfg=TINY, weights=decoders.drawn(TINY, label, tier))


def go_on(state, steps):
    """The next tokens of rows, each the most likely one; every step donates the state before."""
    state, token, tokens = state.state, state.tokens, []
    for _ in range(steps):
        logits, state = donating_step(model().weights, state, token, cfg=TINY)
        token = jnp.argmax(logits, axis=1).astype(jnp.int32)
        tokens.append(token)
    return np.stack(tokens, axis=1).tolist()


donating_step = jax.jit(gdn.decode_step, static_argnames=decoders.STATIC, donate_argnames=("state",))

RESUME = """
import json, sys
from tests.test_state_store import go_on, model
state = model().load_state(sys.argv[1])
print(json.dumps([state.state.position.tolist(), go_on(state, 5)]))
"""


@pytest.mark.slow
def test_another_process_goes_on_at_the_exact_token(tmp_path):
    """F39: rows of unequal length, one shorter than the convolution is wide; no new token is needed to go on."""
    prompts = [[5, 17, 9, 60, 3], [8]]
    whole = model().generate(prompts, max_new_tokens=9)
    first = model().generate(prompts, max_new_tokens=4, keep_state=True)
    model().save_state(tmp_path / "state", first.state)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RESUME, str(tmp_path / "state")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    position, tokens = json.loads(ran.stdout)
    assert position == [len(prompt) + 3 for prompt in prompts]
    assert tokens == whole.tokens[:, 4:].tolist()
    # And here, with what generates. What is loaded may be donated.
    for _ in range(2):
        state = model().load_state(tmp_path / "state")
        assert model().generate([[], []], max_new_tokens=5, state=state).tokens.tolist() == tokens
    assert go_on(model().load_state(tmp_path / "state"), 5) == tokens


def test_a_decoder_finds_its_own(tmp_path):
    state = model().generate([[5, 17], [8, 3]], max_new_tokens=3, keep_state=True).state
    model().save_state(tmp_path / "state", state)
    assert_same(logical(model().load_state(tmp_path / "state")), logical(state))
    with pytest.raises(StateMismatchError, match="belongs to other weights"):
        model("tests/other").load_state(tmp_path / "state")
    with pytest.raises(TypeError, match="state must be a Rows, got DecoderState"):
        model().save_state(tmp_path / "state", state.state)
    gdn.save_state(tmp_path / "bare", state.state, cfg=TINY, weights_id=model().weights_id)
    with pytest.raises(StateMismatchError, match="holds a DecoderState without the tokens that are to come next"):
        model().load_state(tmp_path / "bare")


# What the weights are


def test_a_fingerprint_is_that_of_every_bit_in_its_place():
    base = {"a": np.arange(60, dtype=np.float32).reshape(3, 4, 5), "b": np.arange(8, dtype=np.float16)}
    of_base = gdn.fingerprint(base)
    changed = base["a"].copy()
    changed.view(np.uint32)[2, 3, 4] ^= 1
    swapped = base["a"][:, [1, 0, 2, 3]]
    others = [
        base | {"a": changed},
        base | {"a": swapped},
        base | {"a": base["a"][::-1]},
        base | {"a": np.where(base["a"] == 0, np.float32(-0.0), base["a"])},
        base | {"a": base["a"].reshape(4, 3, 5)},
        base | {"a": base["a"].view(np.int32)},
        base | {"b": base["b"].astype(np.float32)},
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"]},
        base | {"c": np.zeros((0, 3), np.float32)},
    ]
    assert len({of_base, *map(gdn.fingerprint, others)}) == 1 + len(others)
    assert gdn.fingerprint(jax.tree.map(jnp.asarray, base)) == of_base
    assert gdn.fingerprint(dict(reversed(base.items()))) == of_base


def test_a_fingerprint_stays_what_it_is():
    """Saved states hold it: written down from the first version."""
    tree = {"w": jnp.arange(1000, dtype=jnp.float32).reshape(10, 100), "q": jnp.arange(7, dtype=jnp.uint32), "n": None}
    narrow = {"b": jnp.ones(3, jnp.bfloat16), "e": jnp.zeros((2, 0)), "s": jnp.float32(3), "t": jnp.ones(2, bool)}
    assert gdn.fingerprint(tree | narrow) == "c8f0b3f9ed87efa7892f595cfa6ce5a94406bcf2ad3077be312df5ef17362502"


def test_a_fingerprint_is_of_the_weights_and_not_of_their_file():
    ids = {tier: model(tier=tier).weights_id for tier in ("f32", "bf16", "q4")}
    assert len(set(ids.values())) == 3
    assert gdn.fingerprint(decoders.drawn(TINY, "tests/tiny", "q4")) == ids["q4"]
    assert model("tests/other").weights_id != ids["f32"]


@pytest.mark.parametrize(("leaf", "words"), [(np.zeros(2), "got float64"), (1.0, "array, got float"), ("x", "got str")])
def test_what_has_no_fingerprint(leaf, words):
    with pytest.raises(TypeError, match=rf"weights\['w'\] must be .*{words}"):
        gdn.fingerprint({"w": leaf})


def test_a_fingerprint_takes_no_memory():
    leaves = [jax.ShapeDtypeStruct((64, 512, 512), dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.uint32)]
    assert _sums.lower(leaves).compile().memory_analysis().temp_size_in_bytes < 10_000


# Old or new, but whole


def save(path, seed=0):
    gdn.save_state(path, decoder_state(seed=seed), cfg=CFG, weights_id=ID)


def load(path):
    return gdn.load_state(path, cfg=CFG, weights_id=ID)


def is_saved(path, seed):
    assert_same(load(path), logical(decoder_state(seed=seed)))


def test_a_save_replaces_the_one_before_and_leaves_nothing_else(tmp_path):
    for seed in range(3):
        save(tmp_path / "state", seed)
        is_saved(tmp_path / "state", seed)
        names = sorted(entry.name for entry in (tmp_path / "state").iterdir())
        assert names == [f"arrays.{seed + 1}", "state.json"]
    gdn.save_state(tmp_path / "state", rows(), cfg=CFG, weights_id=ID)
    assert_same(load(tmp_path / "state"), logical(rows()))
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), CheckpointError("disk")])
@pytest.mark.parametrize("at", ["save_item", "write_file", "sync_folder"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, at, error, is_first):
    if not is_first:
        save(tmp_path / "state", 1)
        before = files_of(tmp_path)

    def fails(*arguments):
        if at != "sync_folder":
            getattr(real, at)(*arguments)  # half done, or done and not known to be
        raise error

    real = type("Real", (), {name: staticmethod(getattr(array_store, name)) for name in ("save_item", "write_file")})
    with monkeypatch.context() as patch:
        patch.setattr(array_store, at, fails)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError):
            save(tmp_path / "state", 2)
    if at == "sync_folder":  # the rename has been done: the new one is there, whole
        is_saved(tmp_path / "state", 2)
    elif is_first:
        assert list(tmp_path.iterdir()) == []
    else:
        assert files_of(tmp_path) == before
        is_saved(tmp_path / "state", 1)
    save(tmp_path / "state", 3)
    is_saved(tmp_path / "state", 3)
    assert len(list((tmp_path / "state").iterdir())) == 2


KILLED = """
import os, signal, sys
from checkpoints import array_store
from tests.test_state_store import save
def dies(file, content):
    file.write_bytes(content[:100])
    os.kill(os.getpid(), signal.SIGKILL)
array_store.write_file = dies
save(sys.argv[1], 2)
"""


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_one_before_and_does_not_stand_in_the_way(tmp_path):
    """In the middle of the manifest: its beginning is there, and the arrays are."""
    save(tmp_path / "state", 1)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "state")]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    names = {entry.name for entry in (tmp_path / "state").iterdir()}
    assert names == {"state.json", "arrays.1", "arrays.2", ".state.json.partial"}
    is_saved(tmp_path / "state", 1)
    # A first save leaves the same without a state before it.
    first = shutil.copytree(tmp_path / "state", tmp_path / "first")
    (first / "state.json").unlink()
    shutil.rmtree(first / "arrays.1")
    with pytest.raises(CheckpointError, match=r"no saved state, or one whose save was never finished: no state.json"):
        load(first)
    for path in ("state", "first"):
        save(tmp_path / path, 3)
        is_saved(tmp_path / path, 3)
        assert sorted(entry.name for entry in (tmp_path / path).iterdir()) == ["arrays.3", "state.json"]


def test_two_saves_at_once_are_refused(tmp_path):
    save(tmp_path / "state")
    with (
        array_store._locked(tmp_path / "state"),
        pytest.raises(CheckpointError, match="another save is under way there"),
    ):
        save(tmp_path / "state", 1)
    is_saved(tmp_path / "state", 0)


def test_a_state_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    """The manifest is that of before, its arrays are gone: what is there now is read instead."""
    save(tmp_path / "state", 0)
    real, turns = array_store._read, []

    def read(folder, manifest):
        if not turns:
            turns.append(manifest.folder)
            save(folder, 1)
        return real(folder, manifest)

    monkeypatch.setattr(array_store, "_read", read)
    is_saved(tmp_path / "state", 1)
    assert turns == ["arrays.1"]


def test_places_that_hold_something_else_are_never_written_to(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_bytes(b"mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "state.json").write_text('{"format": "another program\'s"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{")
    before = files_of(tmp_path)
    for name in ("file", "folder", "other"):
        with pytest.raises(CheckpointError, match=f"{name}: something else is there; remove it first"):
            save(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"state\.json: not valid JSON"):
        save(tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"the directory .*none does not exist"):
        save(tmp_path / "none" / "state")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save("/proc/state")
    assert files_of(tmp_path) == before
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")
    is_saved(tmp_path / "empty", 0)


# What does not belong together


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A saved state that tests copy, and must not change."""
    path = tmp_path_factory.mktemp("states") / "state"
    gdn.save_state(path, rows(), cfg=CFG, weights_id=ID)
    return path


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (dataclasses.replace(CFG, kv_heads=4), r"differs in kv_heads \(kv_heads is 2 there and 4 here\)"),
        (dataclasses.replace(CFG, rope_theta=1e5, ffn=128), "differs in ffn, rope_theta"),
        (
            dataclasses.replace(CFG, gdn=dataclasses.replace(CFG.gdn, conv_width=3)),
            "differs in gdn.conv_width",
        ),
        (ATTENTION, "differs in gdn.conv_width, gdn.hidden, gdn.key_dim, gdn.key_heads and"),
        (GDN, "holds a Rows, which does not go with a GdnConfig"),
    ],
)
def test_another_geometry_is_refused(whole, cfg, words):
    with pytest.raises(StateMismatchError, match=words):
        gdn.load_state(whole, cfg=cfg, weights_id=ID)


def test_a_gdn_state_is_not_that_of_a_decoder(tmp_path):
    gdn.save_state(tmp_path / "state", gdn.init_state(GDN, layers=1), cfg=GDN, weights_id=ID)
    with pytest.raises(StateMismatchError, match="holds a GdnState, which does not go with a DecoderConfig"):
        load(tmp_path / "state")
    with pytest.raises(ValueError, match="capacity belongs to a decoder's state"):
        gdn.load_state(tmp_path / "state", cfg=GDN, weights_id=ID, capacity=3)


def test_other_weights_are_refused(whole):
    with pytest.raises(StateMismatchError, match=r"other weights \('these weights' there and 'others' here\)"):
        gdn.load_state(whole, cfg=CFG, weights_id="others")


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"state": None}, TypeError, "state must be a GdnState, a DecoderState or Rows, got NoneType"),
        ({"state": gdn.snapshot(gdn.init_state(GDN, layers=1))}, TypeError, "got Snapshot"),
        ({"cfg": GDN}, TypeError, "cfg of a DecoderState must be a DecoderConfig, got GdnConfig"),
        ({"cfg": TINY}, StateMismatchError, r"state.keys .* must be \(1, 3"),
        ({"weights_id": None}, TypeError, "weights_id must be text, such as fingerprint"),
        ({"weights_id": ""}, ValueError, "weights_id must not be empty"),
        ({"position": 17}, StateMismatchError, r"must lie in 0 … 16 \(the capacity\), got \[7, 17, 3\]"),
        ({"position": -1}, StateMismatchError, "must lie in 0"),
    ],
)
def test_what_cannot_be_saved_leaves_nothing(tmp_path, wrong, error, words):
    state = decoder_state()
    if "position" in wrong:
        state = dataclasses.replace(state, position=state.position.at[1].set(wrong["position"]))
    given = {"state": state, "cfg": CFG, "weights_id": ID} | {k: v for k, v in wrong.items() if k != "position"}
    with pytest.raises(error, match=words):
        gdn.save_state(tmp_path / "state", given["state"], cfg=given["cfg"], weights_id=given["weights_id"])
    assert list(tmp_path.iterdir()) == []


def test_values_are_needed(tmp_path):
    def inside(state):
        gdn.save_state(tmp_path / "state", state, cfg=CFG, weights_id=ID)

    for refused in (jax.jit(inside), lambda state: jax.eval_shape(inside, state)):
        with pytest.raises(TypeError, match="state must have values to save"):
            refused(decoder_state())


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"cfg": None}, TypeError, "cfg must be a GdnConfig or a DecoderConfig, got NoneType"),
        ({"weights_id": 3}, TypeError, "weights_id must be text"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"capacity": 1.5}, TypeError, "capacity must be an integer"),
    ],
)
def test_bad_arguments_of_load(whole, wrong, error, words):
    with pytest.raises(error, match=words):
        gdn.load_state(whole, **({"cfg": CFG, "weights_id": ID} | wrong))


# Damage


def files_of(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def refused_or_same(path):
    """Whether it was refused: the alternative is that it is what it was."""
    with contextlib.suppress(CheckpointError):
        assert_same(load(path), logical(rows()))
        return False
    return True


def test_a_flipped_bit_in_any_file_is_refused_or_harmless(whole, tmp_path):
    draw, refused = random.Random(0), 0
    path = shutil.copytree(whole, tmp_path / "state")
    for name, data in files_of(whole).items():
        for position in {0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(3))}:
            changed = bytearray(data)
            changed[position] ^= 1 << draw.randrange(8)
            (path / name).write_bytes(changed)
            refused += refused_or_same(path)
        (path / name).write_bytes(data)
    assert refused > 15


@pytest.mark.parametrize("how", ["cut", "emptied", "removed", "a directory"])
def test_files_that_are_cut_or_missing_are_refused_or_harmless(whole, tmp_path, how):
    refused = 0
    for number, (name, data) in enumerate(files_of(whole).items()):
        path = shutil.copytree(whole, tmp_path / str(number))
        (path / name).unlink()
        if how == "a directory":
            (path / name).mkdir()
        elif how != "removed":
            (path / name).write_bytes(data[: len(data) // 2] if how == "cut" else b"")
        refused += refused_or_same(path)
    assert refused > 4


def test_arrays_of_another_state_in_place_of_ones_own_are_refused(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "state")
    gdn.save_state(tmp_path / "other", rows(seed=1), cfg=CFG, weights_id=ID)
    shutil.rmtree(path / "arrays.1")
    shutil.copytree(tmp_path / "other" / "arrays.1", path / "arrays.1")
    with pytest.raises(
        CheckpointError, match=r"arrays\.1: array '\w+' is damaged: its content does not have its sha256"
    ):
        load(path)


def edited(whole, tmp_path, change):
    """A copy whose manifest was changed by somebody who knows how to seal it."""
    path = shutil.copytree(whole, tmp_path / "state")
    body = json.loads((path / "state.json").read_text())
    del body["sha256"]
    change(body)
    (path / "state.json").write_bytes(encode_sealed(body))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.update(version=2), "written in version 2 of the format, and this program reads version 1"),
        (lambda b: b.update(version="1"), "written in version '1'"),
        (lambda b: b.update(format="x"), "not the manifest of a saved state"),
        (lambda b: b.update(folder="../state/arrays.1"), r"folder must be arrays\.N"),
        (lambda b: b.update(folder="arrays.2"), r"arrays\.2: no such directory"),
        (lambda b: b.update(more=1), "expected the keys"),
        (lambda b: b.update(arrays=[]), "expected the keys"),
        (lambda b: b["arrays"].pop("keys"), "array 'keys' must be float32 .*, got nothing"),
        (lambda b: b["arrays"].update(more=b["arrays"]["keys"]), "array 'more' must be nothing, got float32"),
        (lambda b: b["arrays"]["S"].update(shape=[1 << 50]), "must have at most"),
        (lambda b: b["arrays"]["S"].update(shape=[-1]), "must have a shape of at most 8 sizes"),
        (lambda b: b["arrays"]["S"].update(dtype="object"), "must be one of float32"),
        (lambda b: b["arrays"]["S"].pop("sha256"), "must have the keys"),
        (lambda b: b["arrays"]["S"].update(sha256=3), "array 'S' is damaged"),
        (lambda b: b["arrays"]["tokens"].update(dtype="float32"), "'tokens' must be int32"),
        (lambda b: b["header"].update(kind="x"), "kind must be one of gdn, decoder, rows, got 'x'"),
        (lambda b: b["header"].update(kind="decoder"), "array 'seen' must be nothing"),
        (lambda b: b["header"].update(config=None), "kind must be one of"),
        (lambda b: b["header"].pop("batch"), r"batch must be an integer in 1 … 2147483647, got None"),
        (lambda b: b["header"].update(batch=4), r"must be float32 \[2, 4"),
        (lambda b: b["header"].update(slots=8), r"array 'keys' must be float32 \[2, 3, 8"),
        (lambda b: b["header"].update(slots=-1), "slots must be an integer in 0"),
        (lambda b: b["header"].update(capacity=1 << 40), "capacity must be an integer in 1 … 2147483647"),
        (lambda b: b["header"].update(capacity=6), "with 7 used slots of 6 cannot be"),
        (lambda b: b["header"].update(kv_dtype="float16"), "a cache of 'float16'"),
        (lambda b: b["header"].update(kv_dtype=[]), "a cache of"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(whole, tmp_path, change, words):
    with pytest.raises(CheckpointError, match=words):
        load(edited(whole, tmp_path, change))


def test_positions_that_do_not_go_with_the_slots_are_refused(tmp_path, monkeypatch):
    """The header and the arrays could each be in order."""
    state = dataclasses.replace(decoder_state(), position=jnp.asarray([7, 0, 3], jnp.int32))
    real = state_store.save_arrays

    def wrong(path, header, arrays):
        real(path, header, arrays | {"position": np.asarray([6, 0, 3], np.int32)})

    monkeypatch.setattr(state_store, "save_arrays", wrong)
    gdn.save_state(tmp_path / "state", state, cfg=CFG, weights_id=ID)
    with pytest.raises(CheckpointError, match=r"positions \[6, 0, 3\] do not go with 7 slots"):
        load(tmp_path / "state")


def test_where_nothing_is(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match="no saved state"):
            load(path)
