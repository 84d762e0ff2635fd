"""The multi-token-prediction head: read from every kind of file, against a float64 oracle, and as a drafter."""

import dataclasses
import functools
import logging
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from checkpoints.names import MTP_OWN, is_linear, is_mtp
from gdn_jax import convert, convert_verify
from gdn_jax.decoder.config import DECODERS
from gdn_jax.decoder.model import logits_of
from gdn_jax.decoder.mtp import MtpDrafter, mtp_read, mtp_step
from gdn_jax.decoder.mtp_weights import abstract_mtp, load_mtp, mtp_config, mtp_table, read_mtp
from gdn_jax.decoder.sample import NOT_FINITE
from gdn_jax.decoder.state import init_decoder_state
from gdn_jax.decoder.weights import TIERS, load_decoder, read_decoder
from gdn_jax.errors import CheckpointError, UnsupportedError
from gdn_jax.evidence.metrics import max_rel, rms_rel
from gdn_jax.q4 import Q4Tensor, quantize
from tests.support import decoder_oracle, decoders, gguf_files, hf_files, tolerances

SMALL = decoders.SMALL
DENSE = dataclasses.replace(SMALL, mlp_types=("dense",) * 4, moe=None)
TIED = dataclasses.replace(DENSE, tied=True, kv_heads=4)
MODELS = {"experts": (SMALL, ()), "dense": (DENSE, ()), "tied": (TIED, ()), "its own": (TIED, MTP_OWN)}
T, CAPACITY, DRAFTS = 9, 16, 3
LENGTHS = (9, 0, 1, 2, 5)
BATCH = len(LENGTHS)


class Case:
    """A model with its head, and what the oracle says of its hidden states."""

    def __init__(self, name):
        self.cfg, own = MODELS[name]
        self.tensors = decoders.draw(self.cfg, "mtp") | decoders.draw_mtp(self.cfg, "mtp", own)
        held = decoders.Held(decoders.hf_config(self.cfg), self.tensors)
        self.weights = read_decoder(held)[1]
        self.head = read_mtp(held, cfg=self.cfg, weights=self.weights)
        self.ids = np.random.default_rng(3).integers(0, self.cfg.vocab, (BATCH, T), np.int32)
        self.hidden = np.stack([decoder_oracle.hidden(self.cfg, self.tensors, row) for row in self.ids])

    def oracle(self, ids, before):
        return decoder_oracle.mtp(self.cfg, self.tensors, np.asarray(ids), np.asarray(before))

    def drafter(self, **how):
        return MtpDrafter(cfg=self.cfg, draft_tokens=DRAFTS, **how)


@functools.cache
def case(name):
    return Case(name)


read = jax.jit(lambda drafter, *operands: drafter.read(*operands), static_argnums=0)
propose = jax.jit(lambda drafter, *operands: drafter.propose(*operands, likeliest), static_argnums=0)


def likeliest(logits, ahead):
    return jnp.where(jnp.isfinite(logits).all(axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32), NOT_FINITE)


def exact(array):
    return jnp.asarray(array, jnp.float32)


def begun(model, capacity=CAPACITY, **how):
    drafter = model.drafter(**how)
    return drafter, drafter.begin(model.head, batch=BATCH, capacity=capacity)


def fed(model, lengths=LENGTHS, cuts=(T,), capacity=CAPACITY, **how):
    """A drafter, and its memory after `lengths` tokens of each row, in pieces that end at `cuts`."""
    drafter, memory = begun(model, capacity, **how)
    hidden = np.where((np.arange(T) < np.array(lengths)[:, None])[..., None], model.hidden, np.nan).astype(np.float32)
    start = 0
    for stop in cuts:
        here = jnp.asarray(np.clip(np.array(lengths) - start, 0, stop - start), jnp.int32)
        piece = (jnp.asarray(part[:, start:stop]) for part in (model.ids, hidden))
        tokens, states = piece
        memory = read(drafter, model.head, memory, tokens, here, states)
        start = stop
    return drafter, memory


def written(memory, row):
    """Keys and values of the pairs of a row."""
    count = int(memory.state.position[row])
    return np.asarray(memory.state.keys[0, row, :count]), np.asarray(memory.state.values[0, row, :count])


# What it computes.


@pytest.mark.parametrize("name", MODELS)
def test_the_head_equals_the_oracle_over_a_prompt_and_a_chain(name):
    """Rows of different lengths read a prompt, and then the head is run on: each time fed what it made itself."""
    model = case(name)
    settings = model.drafter()._settings
    _, memory = fed(model)
    state, hidden, tokens = memory.state, memory.hidden, jnp.asarray([7, 11, 13, 17, 19], jnp.int32)
    np.testing.assert_array_equal(state.position, [8, 0, 0, 1, 4])
    step = jax.jit(mtp_step, static_argnums=5)
    pairs = [
        (list(model.ids[row, 1:length]), list(model.hidden[row, : max(length - 1, 0)]))
        for row, length in enumerate(LENGTHS)
    ]
    for row, length in enumerate(LENGTHS):
        pairs[row][1].append(model.hidden[row, length - 1] if length else np.zeros(model.cfg.hidden))
    for _ in range(3):
        for row in range(BATCH):
            pairs[row][0].append(int(tokens[row]))
        hidden, state = step(model.head, state, tokens, hidden, jnp.ones(BATCH, bool), settings)
        logits = np.asarray(logits_of(model.head, hidden, settings))
        for row, (ids, before) in enumerate(pairs):
            made, wanted = model.oracle(ids, before)
            assert max_rel(np.asarray(hidden[row]), made[-1]) <= tolerances.DECODER_ORACLE
            assert max_rel(logits[row], wanted[-1]) <= tolerances.DECODER_ORACLE
            before.append(made[-1])
        tokens = jnp.asarray(logits.argmax(-1), jnp.int32)


@pytest.mark.parametrize("name", ["experts", "dense"])
def test_proposals_are_what_the_oracle_would_draw(name):
    model = case(name)
    drafter, memory = fed(model)
    pending = jnp.asarray([7, 11, 13, 17, 19], jnp.int32)
    proposal, _ = propose(drafter, model.head, memory, pending)
    np.testing.assert_array_equal(proposal.counts, [DRAFTS, 0, DRAFTS, DRAFTS, DRAFTS])
    for row, length in enumerate(LENGTHS):
        ids, before = [*model.ids[row, 1:length], int(pending[row])], list(model.hidden[row, :length])
        for draft in proposal.tokens[row, : proposal.counts[row]].tolist():
            made, logits = model.oracle(ids, before)
            best, second = np.sort(logits[-1])[[-1, -2]]
            assert best - second > 1e-4 * np.abs(logits[-1]).max()  # so that the choice is determined
            assert draft == logits[-1].argmax()
            ids.append(draft)
            before.append(made[-1])


@pytest.mark.parametrize("cuts", [(1, 2, 9), (4, 4, 9)])
def test_prompts_in_pieces_are_remembered_as_whole_ones(cuts):
    model = case("dense")
    _, whole = fed(model)
    _, parts = fed(model, cuts=cuts)
    chex.assert_trees_all_equal(
        (parts.state.position, parts.hidden, parts.begun), (whole.state.position, whole.hidden, whole.begun)
    )
    for row in range(BATCH):
        for got, want in zip(written(parts, row), written(whole, row), strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerances.DECODER_ALONE * np.abs(want).max(initial=0))


def test_the_first_token_makes_no_pair():
    model = case("dense")
    _, memory = fed(model, lengths=(1,) * BATCH)
    np.testing.assert_array_equal(memory.state.position, 0)
    assert memory.begun.all()
    chex.assert_trees_all_equal(memory.hidden, jnp.asarray(model.hidden[:, 0], jnp.float32))
    assert not np.any(np.asarray(memory.state.keys))
    drafter, fresh = begun(model)
    same = read(
        drafter,
        model.head,
        fresh,
        jnp.asarray(model.ids),
        jnp.zeros(BATCH, jnp.int32),
        jnp.full(model.hidden.shape, jnp.nan, jnp.float32),
    )
    chex.assert_trees_all_equal(same, fresh)


def test_rows_are_independent():
    model = case("experts")
    _, memory = fed(model)
    _, others = fed(model, lengths=(3, 9, 4, 2, 5))
    spoilt = dataclasses.replace(memory, hidden=memory.hidden.at[0].set(jnp.nan))
    pending = jnp.asarray([7, 11, 13, 17, 19], jnp.int32)
    drafter = model.drafter()
    want, _ = propose(drafter, model.head, memory, pending)
    for changed in (others, spoilt):
        got, after = propose(drafter, model.head, changed, pending)
        chex.assert_trees_all_equal([x[3:] for x in got], [x[3:] for x in want])
        for row in (3, 4):
            chex.assert_trees_all_equal(written(after, row), written(memory, row))
    assert got.counts[0] == 0  # no choice among such logits
    assert (got.tokens >= 0).all()


def test_proposing_leaves_the_memory_as_it_was():
    model = case("dense")
    drafter, memory = fed(model, lengths=(3, 0, 1, 2, 5))
    pending = jnp.asarray([7, 11, 13, 17, 19], jnp.int32)
    first, after = propose(drafter, model.head, memory, pending)
    chex.assert_trees_all_equal(
        (after.hidden, after.begun, after.state.position), (memory.hidden, memory.begun, memory.state.position)
    )
    for row in range(BATCH):
        chex.assert_trees_all_equal(written(after, row), written(memory, row))
    chex.assert_trees_all_equal(propose(drafter, model.head, after, pending)[0], first)
    tokens, hidden = jnp.asarray(model.ids[:, :4]), jnp.asarray(model.hidden[:, :4], jnp.float32)
    lengths = jnp.asarray([4, 3, 0, 1, 2], jnp.int32)
    grown, plain = (read(drafter, model.head, old, tokens, lengths, hidden) for old in (after, memory))
    chex.assert_trees_all_equal(
        propose(drafter, model.head, grown, pending)[0], propose(drafter, model.head, plain, pending)[0]
    )


def test_draws_are_told_how_far_ahead_they_are_and_what_is_no_token_ends_a_row():
    model = case("dense")
    drafter, memory = fed(model)

    def draw(logits, ahead):
        refused = jnp.asarray([0, 0, 0, 2, 3]) == ahead
        return jnp.where(refused, jnp.asarray([0, 0, 0, -2, model.cfg.vocab]), ahead)

    proposal, _ = drafter.propose(model.head, memory, jnp.zeros(BATCH, jnp.int32), draw)
    np.testing.assert_array_equal(proposal.counts, [3, 0, 3, 1, 2])
    np.testing.assert_array_equal(proposal.tokens, [[1, 2, 3], [0, 0, 0], [1, 2, 3], [1, 0, 0], [1, 2, 0]])


def test_drafts_that_have_no_room_are_not_made():
    """The tokens so far, the pending one and the drafts must fit in nine."""
    model = case("dense")
    drafter, memory = fed(model, lengths=(9, 8, 7, 6, 5), capacity=9)
    proposal, after = propose(drafter, model.head, memory, jnp.zeros(BATCH, jnp.int32))
    np.testing.assert_array_equal(proposal.counts, [0, 0, 1, 2, 3])
    chex.assert_trees_all_equal(after.state.position, memory.state.position)
    for row in range(BATCH):
        chex.assert_trees_all_equal(written(after, row), written(memory, row))


def test_a_sequence_beyond_the_capacity_is_never_counted_beyond_it():
    model = case("dense")
    drafter, memory = fed(model, capacity=5)
    assert int(memory.state.position.max()) == 5
    proposal, after = propose(drafter, model.head, memory, jnp.zeros(BATCH, jnp.int32))
    assert proposal.counts[0] == 0
    assert int(after.state.position.max()) == 5


def test_nothing_is_read_of_an_empty_piece_and_hidden_states_are_needed():
    model = case("dense")
    drafter, memory = fed(model)
    none = jnp.zeros((BATCH, 0), jnp.int32), jnp.zeros(BATCH, jnp.int32), jnp.zeros((BATCH, 0, 32), jnp.float32)
    chex.assert_trees_all_equal(drafter.read(model.head, memory, *none), memory)
    with pytest.raises(ValueError, match="reads hidden states, got none"):
        drafter.read(model.head, memory, *none[:2], None)


def of_tier(model, tier):
    held = decoders.Held(decoders.hf_config(model.cfg), model.tensors)
    return read_mtp(held, cfg=model.cfg, weights=read_decoder(held, tier=tier)[1])


@pytest.mark.parametrize(
    ("tier", "kv_dtype", "bound"), [("bf16", "bfloat16", tolerances.MTP_BF16), ("q4", "float32", tolerances.MTP_Q4)]
)
def test_other_tiers_and_a_cache_in_bfloat16_are_near(tier, kv_dtype, bound):
    model = case("dense")
    head, (drafter, memory) = of_tier(model, tier), begun(model, kv_dtype=kv_dtype)
    step, ahead = jax.jit(mtp_step, static_argnums=5), jnp.full(BATCH, 7, jnp.int32)
    memory = read(drafter, head, memory, jnp.asarray(model.ids), jnp.full(BATCH, T, jnp.int32), exact(model.hidden))
    hidden, _ = step(head, memory.state, ahead, memory.hidden, memory.begun, drafter._settings)
    for row in range(BATCH):
        made, _ = model.oracle([*model.ids[row, 1:], 7], model.hidden[row])
        assert rms_rel(np.asarray(hidden[row]), made[-1]) <= bound


def test_kernels_take_the_head_in_4_bits():
    """Reading by their interpreted bodies. The layer of a step is tested where a decoder's layers are."""
    model = case("dense")
    head, states = of_tier(model, "q4"), {}
    tokens, pairs, hidden = jnp.asarray(model.ids[:2, :2]), jnp.asarray([2, 1], jnp.int32), exact(model.hidden[:2, :2])
    for implementation in ("xla", "interpret"):
        settings = model.drafter(implementation=implementation)._settings
        state = init_decoder_state(settings.cfg, batch=2, capacity=4)
        states[implementation] = jax.jit(mtp_read, static_argnums=5)(head, state, tokens, hidden, pairs, settings)
    for got, want in zip(*(jax.tree.leaves(state) for state in states.values()), strict=True):
        assert max_rel(np.asarray(got), np.asarray(want)) <= tolerances.DECODER_ALONE
    shapes = jax.eval_shape(
        functools.partial(mtp_step, settings=settings), head, state, tokens[:, 0], hidden[:, 0], pairs > 0
    )
    assert shapes[0].shape == (2, 32)


# A head that is right.


def test_a_head_that_is_right_is_believed():
    """A model without memory, whose next token follows from the last, and a head that reads the token alone."""
    tensors = decoders.draw(DENSE, "right") | decoders.draw_mtp(DENSE, "right")
    for name in tensors:
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    tensors["mtp.pre_fc_norm_embedding.weight"] = np.zeros(32, np.float32)
    tensors["mtp.norm.weight"] = tensors["norm.weight"]
    tensors["mtp.fc.weight"] = np.concatenate([np.eye(32), np.zeros((32, 32))], axis=1).astype(np.float32)
    held = decoders.Held(decoders.hf_config(DENSE), tensors)
    cfg, weights = read_decoder(held)
    head = read_mtp(held, cfg=cfg, weights=weights)
    ids = np.random.default_rng(5).integers(0, cfg.vocab, (BATCH, T), np.int32)
    hidden = np.stack([decoder_oracle.hidden(cfg, tensors, row) for row in ids])
    drafter = case("dense").drafter()
    memory = drafter.begin(head, batch=BATCH, capacity=CAPACITY)
    memory = read(drafter, head, memory, jnp.asarray(ids), jnp.full(BATCH, T, jnp.int32), exact(hidden))
    pending = np.array([7, 11, 13, 17, 19], np.int32)
    proposal, _ = propose(drafter, head, memory, jnp.asarray(pending))
    np.testing.assert_array_equal(proposal.counts, DRAFTS)
    for row in range(BATCH):
        sequence = [*ids[row], pending[row]]
        for draft in proposal.tokens[row].tolist():
            assert draft == decoder_oracle.run(cfg, tensors, sequence)[-1].argmax()
            sequence.append(draft)


# The drafter as a value.


def test_drafters_are_values():
    assert MtpDrafter(cfg=SMALL) == MtpDrafter(cfg=SMALL)
    assert hash(MtpDrafter(cfg=SMALL)) == hash(MtpDrafter(cfg=SMALL))
    assert MtpDrafter(cfg=SMALL) != MtpDrafter(cfg=SMALL, draft_tokens=4)
    assert MtpDrafter(cfg=SMALL, draft_tokens=4).count == 4
    assert MtpDrafter.reads_hidden


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"draft_tokens": 0}, ValueError, "draft_tokens must be at least 1"),
        ({"draft_tokens": 1.5}, TypeError, "draft_tokens must be an integer"),
        ({"cfg": None}, TypeError, "cfg must be a DecoderConfig"),
        ({"implementation": "cuda"}, ValueError, "implementation"),
    ],
)
def test_what_no_drafter_can_be_is_refused(wrong, error, words):
    with pytest.raises(error, match=words):
        MtpDrafter(**{"cfg": SMALL} | wrong)


# Weights.


def test_the_27b_head_has_its_known_size():
    cfg = DECODERS["qwen3.5-27b"]
    head = abstract_mtp(cfg, tier="q4")
    assert head.fc.codes.shape == (5120, 10240 // 8)
    assert head.attention.q.codes.shape == (1, 12288, 640)
    matrices = [x for x in jax.tree.leaves(head, is_leaf=lambda x: isinstance(x, Q4Tensor)) if isinstance(x, Q4Tensor)]
    assert sum(matrix.scales.size * 32 for matrix in matrices) == 424_673_280
    assert (head.embed, head.head) == (None, None)
    sparse = abstract_mtp(DECODERS["qwen3-next-80b"])
    assert sparse.mlp is None
    assert sparse.moe.experts.gate.shape == (512, 512, 2048)
    with pytest.raises(ValueError, match="tier must be one of"):
        abstract_mtp(cfg, tier="q8")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tier", TIERS)
def test_every_tensor_lands_in_its_place(name, tier):
    cfg, own = MODELS[name]
    tensors = decoders.draw_mtp(cfg, "mtp", own)
    held = decoders.Held(decoders.hf_config(cfg), decoders.draw(cfg, "mtp") | tensors)
    weights = read_decoder(held, tier=tier)[1]
    head = read_mtp(held, cfg=cfg, weights=weights)
    form = {"f32": lambda x: x, "bf16": lambda x: x.astype(jnp.bfloat16), "q4": quantize}[tier]
    assert {
        is_linear(field.name.format(layer=0, expert=2)) == field.is_matrix for field in mtp_table(cfg, frozenset(own))
    } == {True}
    for field in mtp_table(cfg, frozenset(own)):
        places = range(field.experts(mtp_config(cfg)))
        stored = np.stack([tensors.pop(field.name.format(layer=0, expert=expert)) for expert in places])
        want = jnp.asarray(stored if field.is_stack else stored[0])
        chex.assert_trees_all_equal(field.of(head), form(want) if field.is_matrix else want)
    assert not tensors
    if not own:
        assert head.embed is weights.embed
        assert head.head is weights.head


def test_what_a_head_lacks_it_shares_and_nothing_else():
    for own in [(), MTP_OWN[:1], MTP_OWN[1:], MTP_OWN]:
        tensors = decoders.draw(TIED, "mtp") | decoders.draw_mtp(TIED, "mtp", own)
        held = decoders.Held(decoders.hf_config(TIED), tensors)
        weights = read_decoder(held)[1]
        head = read_mtp(held, cfg=TIED, weights=weights)
        embed, output = (tensors.get(name, tensors["embed_tokens.weight"]) for name in MTP_OWN)
        np.testing.assert_array_equal(head.embed, embed)
        np.testing.assert_array_equal(head.embed if head.head is None else head.head, output)
        chex.assert_trees_all_equal(head.sharing(weights), head)


def test_the_head_may_be_of_another_tier_than_its_model():
    held = decoders.Held(decoders.hf_config(DENSE), decoders.draw(DENSE, "mtp") | decoders.draw_mtp(DENSE, "mtp"))
    weights = read_decoder(held, tier="q4")[1]
    head = read_mtp(held, cfg=DENSE, weights=weights, tier="bf16")
    assert head.fc.dtype == jnp.bfloat16
    assert head.embed is weights.embed
    told = []
    read_mtp(held, cfg=DENSE, weights=weights, progress=told.append)
    assert told[-1].tensors == told[-1].all_tensors == 15


@pytest.fixture(params=["dense", "experts"])
def files(request, tmp_path):
    """Text, tensors and head of a model that GGUF files hold: dense, or of experts."""
    text = gguf_files.config() if request.param == "dense" else gguf_files.moe_config()
    return tmp_path, text, gguf_files.model(text), gguf_files.mtp_model(text)


def expected(text, tensors, head, tier="f32"):
    held = decoders.Held(text, tensors | head)
    cfg, weights = read_decoder(held, tier=tier)
    return cfg, weights, read_mtp(held, cfg=cfg, weights=weights)


def assert_head(path, text, tensors, head, tier="f32", tolerance=0.0):
    """The head at `path` is this one, and so is the model beside it. Norms of GGUF files are stored plus 1."""
    cfg, _, want = expected(text, tensors, head, tier)
    found, own = load_decoder(path, tier=tier)
    assert found == cfg
    got = load_mtp(path, cfg=found, weights=own, tier=tier)
    for field in mtp_table(cfg, frozenset(head)):
        spread = 0.0 if field.is_matrix else tolerance
        chex.assert_trees_all_close(field.of(got), field.of(want), rtol=spread, atol=spread)
    assert ("mtp.embed_tokens.weight" in head) != (got.embed is own.embed)


@pytest.mark.parametrize("bare", [("lm_head.", "mtp."), ("lm_head.",)])
@pytest.mark.parametrize("tier", ["f32", "q4"])
def test_hugging_face_files_are_read_under_either_prefix(files, bare, tier):
    folder, text, tensors, head = files
    path = hf_files.write(folder / "model", text, tensors | head, bare)
    assert_head(path, text, tensors, head, tier)


def test_experts_of_the_head_may_lie_in_one_tensor(tmp_path):
    text = gguf_files.moe_config()
    tensors, head = gguf_files.model(text), gguf_files.mtp_model(text)
    joined, of_expert = {}, re.compile(r"mtp\.layers\.0\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight")
    stacks = {
        m: np.stack([head[f"mtp.layers.0.mlp.experts.{e}.{m}_proj.weight"] for e in range(3)])
        for m in ("gate", "up", "down")
    }
    joined = {name: tensor for name, tensor in head.items() if not of_expert.fullmatch(name)}
    joined["mtp.layers.0.mlp.experts.gate_up_proj"] = np.concatenate([stacks["gate"], stacks["up"]], axis=1)
    joined["mtp.layers.0.mlp.experts.down_proj"] = stacks["down"]
    path = hf_files.write(tmp_path / "model", text, tensors | joined)
    cfg, weights, want = expected(text, tensors, head)
    chex.assert_trees_all_equal(load_mtp(path, cfg=cfg, weights=weights), want.sharing(weights))


def gguf_file(folder, text, tensors, head, types=(), flagged=True, fused=False):
    arch = "qwen3next" if "num_experts" in text else "qwen35"
    stored = {"qwen3next": gguf_files.stored_qwen3next, "qwen35": gguf_files.stored_qwen35}[arch](text, tensors)
    stored |= gguf_files.stored_mtp(text, head)
    if fused:
        block = f"blk.{text['num_hidden_layers']}.ffn"
        both = [stored.pop(f"{block}_{m}_exps.weight") for m in ("gate", "up")]
        stored[f"{block}_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    return gguf_files.write(folder / "model.gguf", arch, gguf_files.mtp_metadata(text, arch, flagged), stored, types)


@pytest.mark.parametrize("flagged", [True, False])
def test_gguf_files_are_read(files, flagged):
    folder, text, tensors, head = files
    path = gguf_file(folder, text, tensors, head, flagged=flagged, fused="num_experts" in text)
    assert_head(path, text, tensors, head, tolerance=2.4e-7)
    assert load_decoder(path)[0].layers == text["num_hidden_layers"]


def test_a_gguf_head_may_have_matrices_of_its_own_and_in_4_bits(tmp_path):
    text = gguf_files.config()
    head = gguf_files.mtp_model(text, own=("embed_tokens.weight", "lm_head.weight"))
    tensors = gguf_files.model(text)
    types = {"blk.3.nextn.eh_proj.weight": gguf_files.Q.Q4_0, "blk.3.ffn_up.weight": gguf_files.Q.Q8_0}
    path = gguf_file(tmp_path, text, tensors, head, types)
    with checkpoints.open_checkpoint(path, mtp=True) as checkpoint:
        words, scales = checkpoint.read_words("mtp.fc.weight")
    cfg, weights = load_decoder(path, tier="q4")
    got = load_mtp(path, cfg=cfg, weights=weights)
    np.testing.assert_array_equal(got.fc.codes, words)
    np.testing.assert_array_equal(got.fc.scales, scales)
    chex.assert_trees_all_equal(
        (got.embed, got.head), (quantize(head["mtp.embed_tokens.weight"]), quantize(head["mtp.lm_head.weight"]))
    )


def test_a_head_that_nobody_asks_for_is_skipped_aloud(files, caplog):
    folder, text, tensors, head = files
    hf = hf_files.write(folder / "model", text, tensors | head)
    gguf, store = gguf_file(folder, text, tensors, head), folder / "store"
    convert.convert(hf, store)
    for path in (hf, gguf, store):
        caplog.clear()
        with caplog.at_level(logging.WARNING), checkpoints.open_checkpoint(path) as checkpoint:
            assert not any(map(is_mtp, checkpoint.names()))
            assert checkpoint.mtp_names() == ()
            assert checkpoint.skipped
        assert "multi-token-prediction" in caplog.text
        caplog.clear()
        with caplog.at_level(logging.WARNING), checkpoints.open_checkpoint(path, mtp=True) as checkpoint:
            assert not any(map(is_mtp, checkpoint.names()))
            assert set(checkpoint.mtp_names()) == head.keys()
            assert checkpoint.skipped == ()
        assert not caplog.text


# Conversion.


@pytest.mark.parametrize(("tier", "parts"), [("f32", "all"), ("q4", "all"), ("q4", "gdn")])
@pytest.mark.parametrize("target", ["store", "model.gguf"])
def test_a_conversion_carries_the_head(tmp_path, tier, parts, target):
    text = gguf_files.config()
    tensors, head = gguf_files.model(text), gguf_files.mtp_model(text, own=("lm_head.weight",))
    source = hf_files.write(tmp_path / "model", text, tensors | head)
    done = convert.convert(source, tmp_path / target, tier=tier, q4_parts=parts)
    assert done.tensors == len(tensors) + len(head)
    assert done.not_q4 == ()
    with checkpoints.open_checkpoint(tmp_path / target, mtp=True) as checkpoint:
        stored = {name for name in head if checkpoint.info(name).dtype == "Q4_0"}
    assert stored == {name for name in head if is_linear(name) and (tier, parts) == ("q4", "all")}
    tolerance = 2.4e-7 if target == "model.gguf" else 0.0
    assert_head(tmp_path / target, text, tensors, head, tier, tolerance)
    verdict = convert_verify.verify(source, tmp_path / target)
    assert verdict.faults == ()
    assert verdict.exact + verdict.bounded == done.tensors


def test_conversions_of_conversions_carry_it_too(tmp_path):
    folder, text = tmp_path, gguf_files.config()
    tensors, head = gguf_files.model(text), gguf_files.mtp_model(text)
    gguf = gguf_file(folder, text, tensors, head)
    convert.convert(gguf, folder / "one", tier="q4")
    convert.convert(folder / "one", folder / "two", tier="q4")
    with checkpoints.open_checkpoint(folder / "two", mtp=True) as checkpoint:
        assert set(checkpoint.mtp_names()) == head.keys()
        assert {checkpoint.records[name].item for name in head} == {"mtp"}
    assert_head(folder / "two", text, tensors, head, "q4", 2.4e-7)
    assert convert_verify.verify(gguf, folder / "two").passed


def test_a_resumed_conversion_keeps_the_head(tmp_path):
    text = gguf_files.config()
    head = gguf_files.mtp_model(text)
    source = hf_files.write(tmp_path / "model", text, gguf_files.model(text) | head)

    def stop(progress):
        if progress.tensors == progress.all_tensors - 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.convert(source, tmp_path / "store", resume=True, progress=stop)
    done = convert.convert(source, tmp_path / "store", resume=True)
    assert 0 < done.resumed < done.tensors
    again = convert.convert(source, tmp_path / "store", resume=True)
    assert again.resumed == again.tensors == done.tensors
    assert convert_verify.verify(source, tmp_path / "store").passed


def test_a_conversion_leaves_out_a_head_of_another_kind_and_says_so(tmp_path, caplog):
    text = gguf_files.config()
    tensors, head = gguf_files.model(text), gguf_files.mtp_model(text)
    head["mtp.layers.1.input_layernorm.weight"] = np.ones(32, np.float32)
    source = hf_files.write(tmp_path / "model", text, tensors | head)
    with caplog.at_level(logging.WARNING):
        done = convert.convert(source, tmp_path / "store")
    assert done.tensors == len(tensors)
    assert "head is left out" in caplog.text
    assert "no place for mtp.layers.1.input_layernorm.weight" in caplog.text
    with checkpoints.open_checkpoint(tmp_path / "store", mtp=True) as checkpoint:
        assert checkpoint.mtp_names() == ()
    assert convert_verify.verify(source, tmp_path / "store").passed


def test_damage_to_a_converted_head_is_found(tmp_path):
    text = gguf_files.config()
    source = hf_files.write(tmp_path / "model", text, gguf_files.model(text) | gguf_files.mtp_model(text))
    other = gguf_files.mtp_model(text, seed=2)
    changed = hf_files.write(tmp_path / "other", text, gguf_files.model(text) | other)
    convert.convert(changed, tmp_path / "store")
    verdict = convert_verify.verify(source, tmp_path / "store")
    assert any("mtp.fc.weight" in fault for fault in verdict.faults)


# What is refused.


def test_a_model_without_a_head_is_refused_when_asked_for_it(files):
    folder, text, tensors, _ = files
    hf = hf_files.write(folder / "model", text, tensors)
    convert.convert(hf, folder / "store")
    gguf = gguf_file(folder, text, tensors, {})  # which announces a block, as files that were stripped do
    cfg, weights = load_decoder(hf)
    for path in (hf, folder / "store", gguf):
        with pytest.raises(CheckpointError, match=r"has no multi-token-prediction head \(tensors named mtp"):
            load_mtp(path, cfg=cfg, weights=weights)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight",
        "mtp.layers.0.post_attention_layernorm.weight",
        "mtp.layers.0.self_attn.k_norm.weight",
        "mtp.layers.0.self_attn.o_proj.weight",
        "mtp.layers.0.mlp.down_proj.weight",
    ],
)
def test_a_missing_misshapen_or_senseless_tensor_is_named(tmp_path, name):
    text = gguf_files.config()
    tensors, head = gguf_files.model(text), gguf_files.mtp_model(text)
    cfg, weights = read_decoder(decoders.Held(text, tensors))
    bad = head[name].copy()
    bad.flat[-1] = np.nan
    without = {key: tensor for key, tensor in head.items() if key != name}
    for number, (wrong, words) in enumerate(
        [
            (without, rf"(needs|lacks 1 tensors of this model:) {name}"),
            (head | {name: head[name][..., :-1]}, rf"'{name}' must have shape \[.*\], got \["),
            (head | {name: head[name].astype(np.int64)}, f"{name!r}.* dtype I64"),
            (head | {name: bad}, f"'{name}' holds NaN or inf"),
        ]
    ):
        path = hf_files.write(tmp_path / str(number), text, tensors | wrong)
        with pytest.raises(CheckpointError, match=words):
            load_mtp(path, cfg=cfg, weights=weights)
        assert load_decoder(path)[0] == cfg  # which never looks at it


@pytest.mark.parametrize(
    "stray",
    ["mtp.layers.1.input_layernorm.weight", "mtp.layers.0.linear_attn.A_log", "mtp.shared.weight", "mtp.fc.bias"],
)
def test_a_tensor_that_has_no_place_is_named(tmp_path, stray):
    text = gguf_files.config()
    tensors, head = gguf_files.model(text), gguf_files.mtp_model(text)
    path = hf_files.write(tmp_path / "model", text, tensors | head | {stray: np.ones(32, np.float32)})
    cfg, weights = load_decoder(path)
    with pytest.raises(CheckpointError, match=f"no place for {re.escape(stray)}"):
        load_mtp(path, cfg=cfg, weights=weights)


def test_a_tensor_under_both_prefixes_is_refused(tmp_path):
    text = gguf_files.config()
    head = gguf_files.mtp_model(text)
    twice = {"model.mtp.fc.weight".removeprefix("model."): head["mtp.fc.weight"]}
    path = hf_files.write(tmp_path / "model", text, gguf_files.model(text) | head | twice)
    from safetensors.numpy import load_file, save_file

    file = path / "model.safetensors"
    save_file(load_file(file) | {"model.mtp.fc.weight": head["mtp.fc.weight"]}, file)
    with pytest.raises(CheckpointError, match=r"are both 'mtp.fc.weight'"):
        checkpoints.open_checkpoint(path, mtp=True)


def test_wrong_gguf_heads_are_named(tmp_path):
    text = gguf_files.config()
    tensors, head = gguf_files.model(text), gguf_files.mtp_model(text)
    stored = gguf_files.stored_qwen35(text, tensors) | gguf_files.stored_mtp(text, head)
    metadata = gguf_files.mtp_metadata(text, "qwen35")
    fc, stray = "blk.3.nextn.eh_proj.weight", {"blk.3.nextn.hc_head.weight": np.ones(4, np.float32)}
    without = {name: array for name, array in stored.items() if name != fc}
    flags = {"qwen35.attention.recurrent_layers": [True, False, True, False, False]}
    two = metadata | flags | {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 2}
    for keys, held, words in [
        (metadata, without, f"lacks 1 tensors of this model: {fc}"),
        (metadata, stored | {fc: stored[fc].T}, rf"{fc}': expected shape \[32, 64\], got \[64, 32\]"),
        (metadata, stored | stray, "no place in this model: blk.3.nextn.hc_head.weight"),
        (two, stored, "has 2 blocks for multi-token prediction; supported are heads of one"),
    ]:
        path = gguf_files.write(tmp_path / "model.gguf", "qwen35", keys, held)
        with pytest.raises(CheckpointError, match=words):
            checkpoints.open_checkpoint(path, mtp=True)
        with checkpoints.open_checkpoint(path) as checkpoint:
            assert checkpoint.config["num_hidden_layers"] == 3


def test_arguments_of_another_kind_are_refused():
    held = decoders.Held(decoders.hf_config(DENSE), decoders.draw(DENSE, "mtp") | decoders.draw_mtp(DENSE, "mtp"))
    cfg, weights = read_decoder(held)
    with pytest.raises(TypeError, match="weights must be a DecoderWeights"):
        read_mtp(held, cfg=cfg, weights=None)
    with pytest.raises(ValueError, match="quantiser must be one of"):
        read_mtp(held, cfg=cfg, weights=weights, quantiser="best")
    odd = dataclasses.replace(DENSE, ffn=40)
    with pytest.raises(UnsupportedError, match="tier 'q4' needs matrices"):
        abstract_mtp(odd, tier="q4")
