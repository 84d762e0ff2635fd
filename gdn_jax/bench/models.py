"""Whole models in a true geometry with random weights, made on the device; and the gate that stands before timing them.

The gate runs a small model with the same kinds of layers, heads of the same sizes in the same ratios: its logits by the
kernels that are chosen against those by plain XLA.
"""

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import memory
from gdn_jax.bench import gate, operands
from gdn_jax.bench.compile_cache import CacheWatch
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.request import Request
from gdn_jax.bench.timing import Step
from gdn_jax.config import GdnConfig
from gdn_jax.decoder.config import DECODERS, DecoderConfig, MoeConfig
from gdn_jax.decoder.state import decoder_state_shapes, init_decoder_state
from gdn_jax.decoder.weights import abstract_decoder
from gdn_jax.q4 import Q4Tensor

__all__ = [
    "Compiled",
    "Verdict",
    "compiled",
    "decoder_by_name",
    "decoder_weights",
    "hybrid",
    "judged",
    "memory_details",
    "miniature",
    "moved",
    "named",
    "new_state",
    "prompt",
    "require_decoder",
    "settings",
]

_GATE_TOKENS = 6
# Bytes of a tensor up to which it is drawn on the host.
_FROM_HOST = 1 << 20

type Logits = Callable[..., jax.Array]
"""(weights, state, tokens [B, T], **named) -> logits with any leading axes."""


def hybrid(gdn: GdnConfig) -> DecoderConfig:
    """Three GDN layers of that geometry and one of full attention: a small model of no published size."""
    return DecoderConfig(
        vocab=512,
        hidden=gdn.hidden,
        layer_types=(*("linear_attention",) * 3, "full_attention"),
        mlp_types=("dense",) * 4,
        heads=4,
        kv_heads=2,
        head_dim=32,
        rotary_dim=16,
        rope_theta=1e4,
        norm_eps=gdn.norm_eps,
        tied=False,
        gdn=gdn,
        ffn=2 * gdn.hidden,
    )


def decoder_by_name(name: str, gdn: GdnConfig) -> DecoderConfig:
    """The published model of that name; else a `hybrid` of the GDN geometry that the name stands for."""
    return DECODERS[name] if name in DECODERS else hybrid(gdn)


def miniature(cfg: DecoderConfig) -> DecoderConfig:
    """The model of the gate: two periods of the layers of `cfg`, heads of its sizes in its ratios, small otherwise."""
    hidden, kv_heads = min(cfg.hidden, 256), min(cfg.kv_heads, 2)
    gdn, moe = cfg.gdn, cfg.moe
    if gdn is not None:
        key_heads = min(gdn.key_heads, 2)
        gdn = dataclasses.replace(gdn, hidden=hidden, key_heads=key_heads, value_heads=key_heads * gdn.ratio)
    if moe is not None:
        experts = min(moe.experts, 8)
        moe = MoeConfig(
            experts=experts,
            experts_per_token=min(moe.experts_per_token, experts),
            ffn=min(moe.ffn, 128),
            shared_ffn=min(moe.shared_ffn, 128),
            norm_topk=moe.norm_topk,
        )
    return dataclasses.replace(
        cfg,
        vocab=min(cfg.vocab, 512),
        hidden=hidden,
        layer_types=cfg.layer_types[: cfg.period] * 2,
        mlp_types=cfg.mlp_types[: cfg.period] * 2,
        heads=kv_heads * (cfg.heads // cfg.kv_heads),
        kv_heads=kv_heads,
        gdn=gdn,
        ffn=None if cfg.ffn is None else min(cfg.ffn, 512),
        moe=moe,
    )


def decoder_weights(seed: int, cfg: DecoderConfig, tier: str) -> Any:
    """`DecoderWeights` of random numbers, the same for the same seed on the same kind of device.

    One tensor at a time, and of a dense one one layer at a time: beside the result there is room for one layer. Small
    ones come from the host, which is faster than compiling a program for each.
    """
    shapes = abstract_decoder(cfg, tier=tier)
    paths, kind = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, Q4Tensor))
    made = []
    for number, (path, leaf) in enumerate(paths):
        own_seed = seed + number
        if operands.nbytes(leaf) <= _FROM_HOST:
            made.append(_from_host(own_seed, leaf, path))
        elif isinstance(leaf, Q4Tensor):
            made.append(_q4(jnp.int32(own_seed), tuple(leaf.shape)))
        else:
            spread = map(jnp.float32, _spread(path, leaf.shape))
            made.append(_dense(jnp.int32(own_seed), tuple(leaf.shape), jnp.dtype(leaf.dtype), *spread))
        jax.block_until_ready(made[-1])
    return kind.unflatten(made)


def _spread(path: Any, shape: Sequence[int]) -> tuple[float, float]:
    """Middle and half width of a tensor's uniform distribution, by its name: outputs of the size of inputs."""
    names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    if names[-1] == "A_log":
        return -0.9, 3.7  # from heads that forget at once to heads that hold on
    if names[-1] == "dt_bias":
        return -3.0, 4.0
    if len(shape) < 3 and "embed" not in names and "head" not in names:  # a norm: that of GDN is stored whole
        return (1.0 if names[0] == "gdn" else 0.0), 0.1
    return 0.0, math.sqrt(3 / shape[-1])


def _from_host(seed: int, leaf: Any, path: Any) -> Any:
    """What `_q4` and `_dense` draw, by numpy."""
    draw = np.random.default_rng(seed)
    if isinstance(leaf, Q4Tensor):
        codes = draw.integers(0, 1 << 32, leaf.codes.shape, np.uint32)
        low, high = operands.scale_range(leaf.shape[-1])
        scales = draw.uniform(low, high, leaf.scales.shape).astype(np.float16)
        return Q4Tensor(codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    middle, width = _spread(path, leaf.shape)
    return jnp.asarray(draw.uniform(middle - width, middle + width, leaf.shape).astype(leaf.dtype))


@functools.partial(jax.jit, static_argnames=("shape",))
def _q4(seed: jax.Array, shape: tuple[int, ...]) -> Q4Tensor:
    stack = operands.q4_stack_of_key(operands.key(seed), math.prod(shape[:-2]), *shape[-2:])
    return jax.tree.map(lambda leaf: leaf.reshape(*shape[:-2], *leaf.shape[1:]), stack)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _dense(seed: jax.Array, shape: tuple[int, ...], dtype: Any, middle: jax.Array, width: jax.Array) -> jax.Array:
    layers = shape[0] if len(shape) > 2 else 1
    one = shape[1:] if len(shape) > 2 else shape

    def layer(number: jax.Array) -> jax.Array:
        drawn = jax.random.uniform(jax.random.fold_in(operands.key(seed), number), one, jnp.float32, -1.0, 1.0)
        return (middle + width * drawn).astype(dtype)

    return jax.lax.map(layer, jnp.arange(layers)).reshape(shape)


def require_decoder(request: Request) -> DecoderConfig:
    """The model that a request is about."""
    if request.decoder is None:
        raise ValueError("this subject needs a whole model, and the request names none")
    return request.decoder


def named(request: Request, precision: str) -> dict[str, Any]:
    """The keywords of `decode_step` and its like."""
    return {"cfg": request.decoder, "precision": precision, "implementation": request.implementation}


def settings(request: Request) -> dict[str, Any]:
    """What a row says of the request that led to it."""
    return {name: getattr(request, name) for name in ("tier", "context", "kv_dtype", "tokens")}


def new_state(request: Request, batch: int) -> Any:
    """The state that sequences start from, in buffers of its own."""
    cfg = require_decoder(request)
    return init_decoder_state(cfg, batch=batch, capacity=request.context, kv_dtype=request.kv_dtype)


def prompt(cfg: DecoderConfig, batch: int, tokens: int) -> np.ndarray:
    """Token ids int32 [B, T]."""
    return np.random.default_rng(0).integers(0, cfg.vocab, (batch, tokens), np.int32)


def moved(request: Request, batch: int) -> int:
    """Bytes that one step must move: weights and keys and values read once, the GDN state read and written.

    Of the embedding, a few rows; it is not counted unless it is the head too. Of the experts, those of the tokens.
    """
    cfg = require_decoder(request)
    weights: Any = abstract_decoder(cfg, tier=request.tier)
    nbytes = operands.nbytes(weights) - (0 if weights.head is None else operands.nbytes(weights.embed))
    if cfg.moe is not None:
        stored, most = cfg.moe.experts, batch * cfg.moe.experts_per_token
        nbytes -= operands.nbytes(weights.moe.experts) * (stored - min(most, stored)) // stored
    state = decoder_state_shapes(cfg, batch=batch, capacity=request.context, kv_dtype=request.kv_dtype)
    return nbytes + 2 * operands.nbytes(state.gdn) + operands.nbytes((state.keys, state.values))


class Verdict(NamedTuple):
    """What the gate found: `max_rel` of the logits against plain XLA, its `bound`, and what carried them out."""

    max_rel: float
    bound: float
    implementation: str

    @property
    def passed(self) -> bool:
        """Whether what was judged may be timed."""
        return self.max_rel <= self.bound


def judged(logits: Logits, batch: int, precision: str, request: Request, tokens: int = _GATE_TOKENS) -> Verdict:
    """Run a small model like the one of the request on so many tokens, with its implementation and by plain XLA."""
    cfg = miniature(require_decoder(request))
    weights = decoder_weights(11, cfg, request.tier)
    state = init_decoder_state(cfg, batch=batch, capacity=2 * tokens, kv_dtype=request.kv_dtype)
    ids = jnp.asarray(prompt(cfg, batch, tokens))

    def by(implementation: str | None) -> Any:
        function = functools.partial(logits, cfg=cfg, precision=precision, implementation=implementation)
        return jax.jit(function, compiler_options=dict(request.effort.options)).lower(weights, state, ids).compile()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ours, reference = pool.map(by, (request.implementation, "xla"))
    got, want = (np.asarray(run(weights, state, ids)) for run in (ours, reference))
    options = {"cfg": cfg, "precision": precision, "implementation": request.implementation}
    step = Step(lambda carry, _, weights: logits(weights, *carry, **options), weights)
    return Verdict(gate.error(got, want), gate.BOUNDS["decoder", precision], implementation_of(step, (state, ids)))


class Compiled(NamedTuple):
    """A program, the seconds that compiling it took, and the bytes that it holds while it runs beside its operands.

    `cache`: whether it was compiled at all, a `CacheWatch.answer`.
    """

    run: Any
    seconds: float
    cache: str
    temp: int

    @property
    def details(self) -> dict[str, Any]:
        """What a row says of how the program came about."""
        return {"compile_seconds": self.seconds, "compile_cache": self.cache}

    @property
    def note(self) -> str:
        """The same in words."""
        how = {"warm": "read from a cache", "none": "compiled"}.get(self.cache, f"compiled, {self.cache} cache,")
        return f"{how} in {self.seconds:.1f} s"


def compiled(jitted: Any, *arguments: Any) -> Compiled:
    """Compile a jitted function for arguments."""
    begin = time.perf_counter()
    with CacheWatch() as watch:
        run = jitted.lower(*arguments).compile()
    seconds = time.perf_counter() - begin
    analysis = run.memory_analysis()
    return Compiled(run, seconds, watch.answer, 0 if analysis is None else analysis.temp_size_in_bytes)


def memory_details(program: Compiled, batch: int, request: Request, *, piece: int = 0) -> dict[str, Any]:
    """Device memory in use now, when weights and state are there, and the program's own, against the budget.

    The program makes steps, or reads a prompt of `piece` tokens.
    """
    load = memory.Load(
        cfg=require_decoder(request),
        tier=request.tier,
        batch=batch,
        context=request.context,
        kv_dtype=request.kv_dtype,
        piece=piece,
    )
    budget = memory.budget(load)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "bytes_in_use": stats.get("bytes_in_use"),
        "budget_bytes": budget.held,
        "temp_bytes": program.temp,
        "budget_workspace_bytes": budget.workspace,
    }
