"""A window of drafted tokens: looked at by the whole model in one call, and then taken as far as they are accepted.

    verify_window     T tokens of every row: the logits after each of them, and the window
    commit_window     the state once the first n tokens of every row are taken, 0 … T of them

Between the two the sequences stand where they stood: S and the convolution's history are not touched. Keys and values
of the window are written beyond the position, where nothing is read, so that taking them is moving the position, and
not taking them is leaving it. In all else a token is a row, so a window costs what T·B rows cost in a step: 4-bit
weights are read once for up to eight of them.
"""

import functools
import typing
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax import window as layers
from gdn_jax.axes import Array, Float32, Int32, Leaf
from gdn_jax.decoder.attention import Cache
from gdn_jax.decoder.block import Settings
from gdn_jax.decoder.border import check_decode, check_lengths
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.model import acceptable_lengths, embed, logits_of, marked_logits, through_layers
from gdn_jax.decoder.state import DecoderState, check_decoder_state
from gdn_jax.decoder.weights import DecoderWeights, check_decoder_weights
from gdn_jax.errors import StateMismatchError, UnsupportedError
from gdn_jax.fence import fence
from gdn_jax.ops import check_implementation
from gdn_jax.require import require_array, require_kind
from gdn_jax.window import GdnWindow

__all__ = ["Window", "Witness", "commit_window", "take_window", "verify_window", "view_window"]

if typing.TYPE_CHECKING:
    Memory = GdnWindow | None
else:
    Memory = Any


@flax.struct.dataclass
class Witness:
    """Parts of a state that another state would hardly share: what a window looked at, and what it left."""

    position: Leaf
    """int32 [B]."""
    S: Leaf | None
    """The first element of every head of the last GDN layer, float32 [B, H]."""
    history: Leaf | None
    """Inputs of the last GDN layer's convolution before the window, float32 [B, W-1, C]."""
    keys: Leaf | None
    """The last attention layer's keys of the window's tokens, [B, T, N, Hd]; 0 beyond a row's length.

    Those that a later window has written over tell that this one is no longer what the state holds.
    """


@flax.struct.dataclass
class Window:
    """T tokens of B sequences that were looked at and not taken yet.

    `lengths` int32 [B]: how many of each row can be taken. `hidden` [B, T, D]: what the model made of them, after its
    final norm. `gdn`: what GDN layers need to take them, 4 · (C + 2H) bytes a token and layer (1.98 MB a token in the
    27B model). `witness`: what tells its state from others.
    """

    gdn: Memory
    lengths: Leaf
    hidden: Leaf
    witness: Witness

    @property
    def tokens(self) -> int:
        """T."""
        return self.hidden.shape[1]


@typing.no_type_check
def verify_window(
    weights: DecoderWeights,
    state: DecoderState,
    tokens: Array,
    *,
    cfg: DecoderConfig,
    lengths=None,
    parents=None,
    precision: str = "exact",
    implementation: str | None = None,
) -> tuple[Array, DecoderState, Window]:
    """Look at tokens int32 [B, T] without taking them: logits [B, T, vocab] after each, the state, and their window.

    The state that comes back has the same sequences, and must be the one that the window is committed to: keys and
    values of the window lie beyond its positions. A window that is not committed needs nothing done; the state goes on.

    Row b has the first `lengths[b]` of its tokens (int32 [B]; None: all T); logits beyond are 0. From the first token
    on that cannot be taken (the state is full, or a traced token lies outside the vocabulary), logits are NaN, and no
    such token can be committed.

    The arithmetic is that of `decode_step`, in `precision` and by `implementation`; with other numbers of rows,
    products may round otherwise. `parents` may say which token each follows (-1: the state); only chains are taken.

    Plain function: it is not jitted and donates nothing. Without donation each call copies the keys and values, so use

        jax.jit(verify_window, static_argnames=("cfg", "parents", "precision", "implementation"),
                donate_argnames=("state",))

    Raises:
        ValueError, TypeError, StateMismatchError: as `decode_step`; no token. UnsupportedError: as `decode_step`;
        parents that are a tree's, for which S would have to be kept for every branch.
    """
    tokens = check_decode(weights, state, tokens, "B T", cfg, precision, implementation)
    if tokens.shape[1] == 0:
        raise ValueError("tokens must be [B, T] with T of at least 1: a window needs a token")
    lengths = check_lengths(lengths, state.batch, tokens.shape[1])
    _check_chain(parents, tokens.shape[1])
    return view_window(weights, state, tokens, lengths, Settings(cfg, precision, implementation))


@typing.no_type_check
def commit_window(
    weights: DecoderWeights,
    state: DecoderState,
    window: Window,
    accepted: Array,
    *,
    cfg: DecoderConfig,
    implementation: str | None = None,
) -> DecoderState:
    """The state once the first `accepted` int32 [B] tokens of each row are taken; 0 leaves a row as it is, bit for bit.

    S is read and written once, whatever was accepted, and takes the tokens one after the other as steps do.

    A commit moves the positions, so the window cannot be committed a second time, unless it was to 0 tokens. Where
    positions are traced, rows that do not stand where the window begins stay as they are, and `accepted` counts as the
    nearer end of 0 … `window.lengths`.

        jax.jit(commit_window, static_argnames=("cfg", "implementation"), donate_argnames=("state",))

    Raises:
        TypeError: `window` is none, `accepted` is not int32. ValueError: a wrong shape, or more accepted than the
        window's tokens. StateMismatchError: a state of another geometry, or not the one that the window belongs to.
        UnsupportedError: a named implementation that cannot be had. Nothing is changed then.
    """
    require_kind("cfg", cfg, DecoderConfig)
    require_kind("window", window, Window)
    check_implementation(implementation)
    check_decoder_weights(weights, cfg)
    check_decoder_state(state, cfg)
    _check_window(window, state, cfg)
    require_array("accepted", accepted, "int32")
    if accepted.shape != (state.batch,):
        raise ValueError(f"accepted must be [B] with B={state.batch} (the state's batch), got shape {accepted.shape}")
    _check_accepted(accepted, window.lengths)
    _check_witness(window, state)
    return take_window(weights, state, window, jnp.asarray(accepted), Settings(cfg, "exact", implementation))


def view_window(
    weights: Any, state: Any, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"], settings: Settings
) -> tuple[Float32[Array, "B T vocab"], Any, Window]:
    """`verify_window` without its checks."""
    cfg = settings.cfg
    batch, count = tokens.shape
    index = jnp.arange(count, dtype=jnp.int32)
    lengths = jnp.clip(lengths, 0, count)
    taken = acceptable_lengths(tokens, lengths, state, cfg)
    position = (state.position[None] + index[:, None]).reshape(-1)
    writes = (index[:, None] < taken[None]).reshape(-1)

    def look(window, h, gdn_cfg, layer):
        how = settings.precision, settings.implementation
        return layers.look(weights.gdn, state.gdn, window, h, gdn_cfg, layer, taken, *how)

    memory = None
    if cfg.gdn is not None:
        memory = layers.new_window(cfg.gdn, layers=state.gdn.layers, tokens=count, batch=batch)
    x = fence(embed(weights.embed, tokens.T.reshape(-1)))
    cache = Cache(state.keys, state.values)
    hidden, memory, cache = through_layers(weights, x, memory, cache, position, writes, settings, look)
    logits = logits_of(weights, hidden, settings)
    logits, hidden = (jnp.swapaxes(rows.reshape(count, batch, -1), 0, 1) for rows in (logits, hidden))
    wanted, written = (index[None] < ends[:, None] for ends in (lengths, taken))
    state = DecoderState(state.gdn, cache.keys, cache.values, state.position)
    window = Window(memory, taken, hidden, _witness(state, taken, count))
    return marked_logits(logits, wanted, written), state, window


def take_window(weights: Any, state: Any, window: Window, accepted: Int32[Array, "B"], settings: Settings) -> Any:
    """`commit_window` without its checks."""
    counts = jnp.clip(accepted, 0, window.lengths)
    counts = jnp.where(state.position == window.witness.position, counts, 0)
    memory, gdn_cfg = state.gdn, settings.cfg.gdn
    if window.gdn is not None and gdn_cfg is not None:
        memory = layers.take(weights.gdn, memory, window.gdn, counts, gdn_cfg, settings.implementation)
    return DecoderState(memory, state.keys, state.values, state.position + counts)


def _witness(state: Any, lengths: Int32[Array, "B"], count: int) -> Witness:
    s = history = keys = None
    if state.gdn is not None:
        s, history = state.gdn.S[-1, :, :, 0, 0], state.gdn.conv_hist[-1]
    if state.keys.shape[0]:
        index = jnp.arange(count, dtype=jnp.int32)[None]
        slots = jnp.clip(state.position[:, None] + index, 0, state.capacity - 1)
        keys = state.keys[-1, jnp.arange(state.batch)[:, None], slots]
        keys = jnp.where((index < lengths[:, None])[..., None, None], keys, jnp.zeros_like(keys))
    # A copy: the state may be donated while the window is kept.
    return Witness(jnp.copy(state.position), s, history, keys)


def _check_chain(parents: Any, tokens: int) -> None:
    if parents is None:
        return
    if isinstance(parents, Tracer):
        raise TypeError("parents must be known when the function is traced: make them a static argument, a tuple")
    given = np.asarray(parents)
    if given.shape != (tokens,) or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"parents must be T = {tokens} integers, -1 for the state, got {parents!r}")
    if not np.array_equal(given, np.arange(tokens) - 1):
        raise UnsupportedError(
            f"parents must be -1, 0, 1, …, each token following the one before, got {given.tolist()}: in a tree every "
            "branch has an S of its own; branch(state, n) makes rows of them, and each row takes a chain"
        )


def _check_window(window: Window, state: Any, cfg: DecoderConfig) -> None:
    if window.hidden.shape[0] != state.batch:
        raise StateMismatchError(f"the window has B={window.hidden.shape[0]} rows, the state {state.batch}")
    require_array("window.lengths", window.lengths, "int32")
    if window.lengths.shape != (state.batch,):
        raise StateMismatchError(f"window.lengths must be [B] with B={state.batch}, got shape {window.lengths.shape}")
    if (window.gdn is None) != (cfg.gdn is None):
        raise StateMismatchError("the window and cfg differ in whether there are GDN layers")
    if window.gdn is None or cfg.gdn is None:
        return
    sizes = {"layers": state.gdn.layers, "tokens": window.tokens, "batch": state.batch}
    want = jax.eval_shape(functools.partial(layers.new_window, cfg.gdn, **sizes))
    for name, axes in (("xc", "L, T, B, C"), ("beta", "L, T, B, H"), ("g", "L, T, B, H")):
        found, shape = getattr(window.gdn, name), getattr(want, name).shape
        require_array(f"window.gdn.{name}", found, "float32")
        if found.shape != shape:
            raise StateMismatchError(
                f"window.gdn.{name} [{axes}] must be {shape} for this configuration, got {found.shape}; commit with "
                "the weights, cfg and state that verify_window was called with"
            )


def _check_accepted(accepted: Any, lengths: Any) -> None:
    if isinstance(accepted, Tracer) or isinstance(lengths, Tracer):
        return
    values, most = np.asarray(accepted), np.asarray(lengths)
    if ((values < 0) | (values > most)).any():
        raise ValueError(
            f"accepted must lie in 0 … {most.tolist()} (the tokens of each row in the window), got {values.tolist()}"
        )


def _check_witness(window: Window, state: Any) -> None:
    """Refuse a state that is not the one that the window looked at, as far as can be seen: some 130 kB are compared."""
    found = _witness(state, window.lengths, window.tokens)
    # The positions first: they decide which keys are compared.
    for name in ("position", "S", "history", "keys"):
        was, now = getattr(window.witness, name), getattr(found, name)
        if isinstance(was, Tracer) or isinstance(now, Tracer) or was is None or now is None:
            return
        was, now = np.asarray(was), np.asarray(now)
        if was.shape == now.shape and np.array_equal(was, now, equal_nan=name != "position"):
            continue
        where = ""
        if name == "position" and was.shape == now.shape:
            where = f": its rows stand at {now.tolist()}, and the window begins at {was.tolist()}"
        raise StateMismatchError(
            f"the window does not belong to this state{where}; a window can be committed once, to the state that "
            "verify_window returned with it"
        )
