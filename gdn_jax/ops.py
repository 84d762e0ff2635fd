"""Which implementation carries out an operation here, and why: the only module that may import `pallas_kernels`.

A request without a name gets the kernel wherever the kernel takes it, and plain XLA elsewhere; a named implementation
is carried out exactly or refused. "interpret" runs the bodies of the kernels as plain XLA on any device: slow, for
tests and for looking inside.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax import delta, linear
from gdn_jax.axes import Active, Array, Float32, Int32
from gdn_jax.delta_backward import with_backward
from gdn_jax.delta_pieces import in_pieces, shapes_of_v
from gdn_jax.errors import UnsupportedError
from gdn_jax.fence import fence
from gdn_jax.gates import log_decay, write_strength
from gdn_jax.limbs import LIMBS, group_digits, q4_matvec
from gdn_jax.norms import QK_EPS, rms_norm
from gdn_jax.products import einsum
from gdn_jax.q4 import Q4Tensor, dequantize
from gdn_jax.rules import with_rules
from pallas_kernels import attend as attend_kernels
from pallas_kernels import delta_chunk as chunk_kernels
from pallas_kernels import delta_step as delta_kernels
from pallas_kernels import delta_window as window_kernels
from pallas_kernels import limbs as limb_kernels
from pallas_kernels import project_in, q4_gemm, q4_gemv
from pallas_kernels.bandwidth import copy as bandwidth_copy
from pallas_kernels.bandwidth import read as bandwidth_read
from pallas_kernels.delta_step import LayerStep
from pallas_kernels.project_in import LayerInput

__all__ = [
    "IMPLEMENTATIONS",
    "PRECISIONS",
    "PROMPT_PRECISIONS",
    "Activations",
    "Choice",
    "add_and_norm",
    "attend_from_cache",
    "attend_limbs",
    "bandwidth_copy",
    "bandwidth_read",
    "check_implementation",
    "check_precision",
    "check_products",
    "choose",
    "choose_attend",
    "choose_delta_chunks",
    "choose_delta_layer",
    "choose_delta_window",
    "choose_layer_gates",
    "choose_layer_input",
    "choose_product",
    "choose_rows",
    "delta_chunks",
    "delta_layer",
    "delta_step",
    "dense",
    "elementwise",
    "implementation_report",
    "layer_gates",
    "layer_input",
    "look_at_window",
    "project",
    "project_many",
    "project_rows",
    "take_window",
    "with_limbs",
]

IMPLEMENTATIONS = ("xla", "mosaic", "triton", "interpret")
PRECISIONS = {"f32": ("exact",), "q4": ("exact", "q8")}
"""Tier of the large projections -> the precisions that a step has."""
PROMPT_PRECISIONS = {tier: (*names, "bf16") for tier, names in PRECISIONS.items()}
"""The same for all tokens of a prompt at once, where products are of many rows."""

type Matrix = Array | Q4Tensor

# Rows of one launch or loop step of `project_rows`, and the floats of their partial sums that may be more where a
# matrix is small: a loop has its price, too.
_ROWS = 8
_PARTIAL_SUMS = 1 << 22
_FEW_ROWS = 16
"""Rows up to which two launches of the kernel for few take no longer than one of the kernel for many: both read the
weights at least once, and the latter does three products (q4_gemm-h200.jsonl, bench-gemv-h200.jsonl)."""
_GATES = project_in.Gates(beta=write_strength, g=log_decay)
_PIECES = {"exact": 3, "bf16": 1}
"""Precision -> bfloat16 pieces of x in the kernel for many rows."""


class Activations(NamedTuple):
    """The x of a product as kernels take it, made once by the operation that x comes from."""

    x: Any
    """float32 [B, I]; None where all products with it are of 4-bit matrices."""
    digits: Array
    """Limbs of x, int8 [limbs, B, I] …"""
    scales: Array
    """… and their scales, float32 [B, I/32]."""


class Choice(NamedTuple):
    """The implementation chosen for an operation, and the reason in words."""

    operation: str
    implementation: str
    reason: str


def check_implementation(implementation: str | None) -> None:
    """Refuse a name that no operation knows.

    Raises:
        ValueError: listing the names.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")


def choose(operation: str, implementation: str | None, objections: Mapping[str, str | None]) -> Choice:
    """The implementation that carries out a request.

    `objections` names the kernels that there are, the preferred one first, and why each cannot take the request (None:
    it can).

    Raises:
        ValueError: an unknown implementation. UnsupportedError: a named one that cannot do it.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return Choice(operation, "xla", "asked for by name")
    if implementation is None:
        for name, objection in objections.items():
            if objection is None and name != "interpret":
                return Choice(operation, name, "the kernel takes this request on this device")
        return Choice(operation, "xla", next(iter(objections.values())) or "")
    objection = objections.get(implementation, f"it has no such form, only xla, {', '.join(objections)}")
    if objection is not None:
        raise UnsupportedError(
            f"implementation={implementation!r} cannot carry out {operation}: {objection}; "
            "use 'xla', or None to have it chosen"
        )
    return Choice(operation, implementation, "asked for by name")


def implementation_report() -> tuple[Choice, ...]:
    """What each operation will run on here, and why, for one sequence in the 27B geometry."""
    state = jax.ShapeDtypeStruct((48, 1, 48, 128, 128), jnp.float32)
    cache = jax.ShapeDtypeStruct((16, 1, 4096, 4, 256), jnp.float32)
    return (
        choose("project", None, _product_objections([(48, 16384, 5120)], 1, 3)),
        choose("layer_input", None, _objections(project_in.supported, 48, 10240, 6144, 5120, 1, 3)),
        choose_layer_gates(4, None),
        choose("delta_layer", None, _objections(delta_kernels.supported, state)),
        choose("attend", None, _objections(attend_kernels.supported, cache, 24)),
        choose_delta_window(state, 4, None),
        choose("project_rows", None, {"mosaic": q4_gemm.supported([(48, 16384, 5120)], 512, _PIECES["exact"])}),
        choose_delta_chunks(jax.ShapeDtypeStruct((512, 1, 48, 128), jnp.float32), 16, 128, "exact", None),
    )


def _objections(supported: Callable[..., str | None], *request: Any) -> dict[str, str | None]:
    """Why a kernel of one form cannot take a request: compiled, and interpreted."""
    return {"triton": supported(*request), "interpret": supported(*request, interpret=True)}


def _product_objections(shapes: list[tuple[int, int, int]], batch: int, limbs: int) -> dict[str, str | None]:
    forms = {name: q4_gemv.supported(shapes, batch, limbs, backend=name) for name in ("triton", "mosaic")}
    preferred = q4_gemv.choose_backend(shapes, batch)
    interpreted = q4_gemv.supported(shapes, batch, limbs, interpret=True)
    return {preferred: forms.pop(preferred), **forms, "interpret": interpreted}


def check_precision(precision: str, tier: str, precisions: Mapping[str, tuple[str, ...]] = PRECISIONS) -> None:
    """Refuse a precision that the tier does not have, in a step or, with `PROMPT_PRECISIONS`, in a prompt.

    Both tiers have "exact", 4-bit weights "q8" (activations of 8 bits), and prompts "bf16" (bfloat16 operands).

    Raises:
        UnsupportedError: naming what there is.
    """
    if precision not in precisions[tier]:
        hint = f"; {precision} is for prompts" if precision in PROMPT_PRECISIONS[tier] else ""
        raise UnsupportedError(
            f"precision must be one of {', '.join(precisions[tier])} for weights of tier {tier!r}, got "
            f"{precision!r}{hint}"
        )


def project(
    w: Matrix,
    x: Float32[Array, "B I"] | Activations,
    *,
    precision: str = "exact",
    implementation: str | None = None,
    layer: Int32[Array, ""] | None = None,
) -> Float32[Array, "B O"]:
    """y = W x for one matrix: `project_many`."""
    [y] = project_many((w,), x, precision=precision, implementation=implementation, layer=layer)
    return y


def project_many(
    matrices: Sequence[Matrix],
    x: Float32[Array, "B I"] | Activations,
    *,
    precision: str = "exact",
    implementation: str | None = None,
    layer: Int32[Array, ""] | None = None,
) -> tuple[Float32[Array, "B O"], ...]:
    """y_m = W_m x for matrices of one input, all [O_m, I], or all stacked [L, O_m, I] with `layer` naming which.

    Matrices in float32 or bfloat16 are multiplied in float32 by `linear.project`, whatever the implementation. 4-bit
    matrices go to the kernel in one launch, which reads their layer in place, or to `limbs.q4_matvec`. x may come with
    its limbs from the operation that made it.

    Raises:
        UnsupportedError: a named implementation that cannot do it.
    """
    shape = x.digits.shape[1:] if isinstance(x, Activations) else x.shape
    name = _kernel_for(matrices, shape, precision, implementation)
    if name is None:
        return tuple(_project_by_xla(_taken(w, layer), dense(x), precision) for w in matrices)
    made = with_limbs(x, precision, interpret=name == "interpret")
    packed = [w for w in matrices if isinstance(w, Q4Tensor)]
    products = iter(_products(packed, made.digits, made.scales, layer, name))
    return tuple(
        next(products) if isinstance(w, Q4Tensor) else _project_by_xla(_taken(w, layer), dense(x), precision)
        for w in matrices
    )


def elementwise(
    function: Callable[..., Array],
    *inputs: Float32[Array, "B I"],
    consumers: Sequence[Matrix],
    precision: str,
    implementation: str | None,
) -> Array | Activations:
    """x = function(*inputs), element by element, for products with `consumers`: with limbs where kernels take those."""
    name = _kernel_for(consumers, inputs[0].shape, precision, implementation)
    if name is None or not all(isinstance(w, Q4Tensor) for w in consumers):
        return fence(function(*inputs))
    limbs = LIMBS[precision]
    made = limb_kernels.split_rows(inputs, function, _splitter(limbs), limbs=limbs, interpret=name == "interpret")
    return Activations(None, *made)


def add_and_norm(
    x: Float32[Array, "B D"],
    y: Float32[Array, "B D"],
    weight: Float32[Array, "Lw D"],
    layer: Int32[Array, ""],
    eps: float,
    *,
    consumers: Sequence[Matrix],
    precision: str,
    implementation: str | None,
) -> tuple[Float32[Array, "B D"], Array | Activations]:
    """x + y, and its RMSNorm for products with `consumers`: with limbs where kernels take those."""
    name = _kernel_for(consumers, x.shape, precision, implementation)
    if name is None or x.shape[1] > limb_kernels.MAX_NORM_COLUMNS:
        total = fence(x + y)
        return total, fence(rms_norm(total, lax.dynamic_index_in_dim(weight, layer, 0, keepdims=False), eps))
    made = limb_kernels.norm_rows(
        x,
        y,
        weight,
        _index(layer),
        _splitter(LIMBS[precision]),
        limbs=LIMBS[precision],
        eps=eps,
        interpret=name == "interpret",
    )
    return made.total, Activations(made.h, made.digits, made.x_scales)


def dense(x: Array | Activations) -> Array:
    """x itself, with or without its limbs."""
    return x.x if isinstance(x, Activations) else x


def _kernel_for(consumers, x_shape, precision, implementation) -> str | None:
    """The kernel that will multiply the 4-bit matrices among the consumers of an x; None without one."""
    packed = [w for w in consumers if isinstance(w, Q4Tensor)]
    name = choose_product(packed, x_shape, precision, implementation).implementation if packed else "xla"
    return None if name == "xla" else name


def with_limbs(x: Array | Activations, precision: str, *, interpret: bool) -> Activations:
    """x with its limbs, made here in one launch unless it came with them."""
    if isinstance(x, Activations):
        return x
    limbs = LIMBS[precision]
    digits, scales = limb_kernels.split_rows((x,), lambda x: x, _splitter(limbs), limbs=limbs, interpret=interpret)
    return Activations(x, digits, scales)


def choose_product(
    matrices: Sequence[Q4Tensor], x_shape: tuple[int, ...], precision: str, implementation: str | None
) -> Choice:
    """The implementation of the products of 4-bit matrices with x [B, I]."""
    shapes = [_stacked_shape(w) for w in matrices]
    batch = min(x_shape[0], q4_gemv.MAX_BATCH)
    return choose("project", implementation, _product_objections(shapes, batch, LIMBS[precision]))


def _stacked_shape(w: Q4Tensor) -> tuple[int, int, int]:
    """[L, N, I] of a stack, or of a matrix as a stack of one."""
    return (math.prod(w.shape[:-2]), w.shape[-2], w.shape[-1])


def check_products(large: Any, precision: str, implementation: str | None) -> None:
    """Refuse a named implementation that cannot carry out the products of a layer's large projections.

    Raises:
        UnsupportedError: saying why.
    """
    for w in jax.tree.leaves(large, is_leaf=lambda node: isinstance(node, Q4Tensor)):
        if isinstance(w, Q4Tensor):
            choose_product([w], (1, w.shape[-1]), precision, implementation)


def project_rows(
    matrices: Sequence[Matrix],
    x: Float32[Array, "M I"],
    *,
    precision: str,
    implementation: str | None,
    layer: Int32[Array, ""] | None = None,
) -> tuple[Float32[Array, "M O"], ...]:
    """y_m = W_m x as `project_many`, for the many rows of a prompt: what is held beside them does not grow with M.

    "bf16" rounds x to bfloat16, and matrices in float32 too, and sums in float32. 4-bit weights stay exact. Their
    products with many rows go to a kernel of their own, which takes x in bfloat16 pieces: one, or three for all of its
    digits.

    Raises:
        UnsupportedError: a named implementation that cannot do it.
    """
    choice = choose_rows(matrices, x.shape[0], precision, implementation)
    by_xla = functools.partial(_rows_by_xla, precision=precision)
    if choice.implementation == "xla":
        return by_xla(tuple(matrices), x, layer)
    by_kernel = functools.partial(_rows_by_kernel, precision=precision, implementation=choice.implementation)
    return with_rules(by_kernel, by_xla, implementation)(tuple(matrices), x, layer)


def choose_rows(matrices: Sequence[Matrix], rows: int, precision: str, implementation: str | None) -> Choice:
    """The implementation of `project_rows` for so many rows."""
    packed = [w for w in matrices if isinstance(w, Q4Tensor)]
    if not packed:
        return Choice("project_rows", "xla", "the kernels take 4-bit matrices")
    objection = _many_rows_objection(packed, rows, precision)
    if precision == "bf16":
        objections = {"mosaic": objection} | dict.fromkeys(("triton", "interpret"), "its products have 8 or 24 bits")
        return choose("project_rows", implementation, objections)
    if objection is None and implementation in (None, "mosaic"):
        return Choice("project_rows", "mosaic", "the kernel for many rows takes this request on this device")
    return choose_product(packed, (min(rows, _ROWS), packed[0].shape[-1]), precision, implementation)


def _many_rows_objection(packed: Sequence[Q4Tensor], rows: int, precision: str) -> str | None:
    """Why the kernel for many rows does not take these matrices, or should not; None: it does."""
    if precision not in _PIECES:
        return f"the kernel for many rows has no precision {precision!r}"
    if precision == "exact" and rows <= _FEW_ROWS:
        return f"up to {_FEW_ROWS} rows are faster {_ROWS} at a time"
    return q4_gemm.supported([_stacked_shape(w) for w in packed], rows, _PIECES[precision])


def _rows_by_kernel(matrices, x, layer, *, precision, implementation):
    packed = [w for w in matrices if isinstance(w, Q4Tensor)]
    if implementation == "mosaic" and _many_rows_objection(packed, x.shape[0], precision) is None:
        at = _index(0 if layer is None else layer)
        products = iter(q4_gemm.q4_gemm(_stacks(packed, layer), x, at, pieces=_PIECES[precision]))
        return tuple(
            next(products) if isinstance(w, Q4Tensor) else _rows_of_one(_taken(w, layer), x, precision)
            for w in matrices
        )

    def multiply(rows):
        return project_many(matrices, rows, precision=precision, implementation=implementation, layer=layer)

    return _in_batches(multiply, x, _ROWS)


def _rows_by_xla(matrices, x, layer, *, precision):
    return tuple(_rows_of_one(_taken(w, layer), x, precision) for w in matrices)


def _rows_of_one(w: Matrix, x: Array, precision: str) -> Array:
    if precision == "bf16":
        if not isinstance(w, Q4Tensor):
            return linear.project_rounded(w, x)
        rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
        return einsum("mi,ni->mn", rounded, dequantize(w))
    if isinstance(w, Q4Tensor):
        return q4_matvec(w, x, precision=precision)  # which goes by rows itself
    sums = w.shape[-2] * math.ceil(w.shape[-1] / linear.BLOCK)
    return _in_batches(lambda rows: linear.project_rows(w, rows), x, max(_ROWS, _PARTIAL_SUMS // sums))


def _in_batches(function: Callable[[Array], Any], x: Float32[Array, "M I"], size: int) -> Any:
    """`function` of all rows of x, `size` of them at a time."""
    count, columns = x.shape
    if count <= size:
        return function(x)
    batches = jnp.pad(x, ((0, -count % size), (0, 0))).reshape(-1, size, columns)
    found = lax.map(function, batches)
    return jax.tree.map(lambda y: y.reshape(-1, y.shape[-1])[:count], found)


def _project_by_xla(w: Matrix, x: Array, precision: str) -> Array:
    return q4_matvec(w, x, precision=precision) if isinstance(w, Q4Tensor) else linear.project(w, x)


def _taken(w: Matrix, layer: Array | None) -> Matrix:
    """One layer of a stack."""
    if layer is None:
        return w
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False), w)


def _stacks(matrices: Sequence[Q4Tensor], layer: Array | None) -> list[tuple[Array, Array]]:
    """Codes and scales as kernels take them, with an axis of layers in any case."""
    return [(w.codes, w.scales) if layer is not None else (w.codes[None], w.scales[None]) for w in matrices]


def _products(matrices, digits, scales, layer, implementation) -> tuple[Array, ...]:
    """4-bit products with limbs, rows in batches that the kernel takes."""
    launch = functools.partial(
        q4_gemv.q4_gemv,
        _stacks(matrices, layer),
        layer=_index(0 if layer is None else layer),
        backend="mosaic" if implementation == "mosaic" else "triton",
        interpret=implementation == "interpret",
    )
    most = q4_gemv.MAX_BATCH
    starts = range(0, digits.shape[1], most)
    parts = [launch(digits[:, start : start + most], scales[start : start + most]) for start in starts]
    if len(parts) == 1:
        return parts[0]
    return tuple(jnp.concatenate(rows) for rows in zip(*parts, strict=True))


def _index(layer: int | Array) -> Int32[Array, "1"]:
    return jnp.asarray(layer, jnp.int32).reshape(1)


def choose_layer_input(qkv: Matrix, z: Matrix, batch: int, precision: str, implementation: str | None) -> Choice:
    """The implementation of a layer's input half with stacked projections qkv [L, C, D] and z [L, H·V, D]."""
    if not isinstance(qkv, Q4Tensor):
        return Choice("layer_input", "xla", "the kernel takes 4-bit projections")
    layers, channels, columns = qkv.shape
    values = list(z.shape)[-2]
    objections = _objections(project_in.supported, layers, channels, values, columns, batch, LIMBS[precision])
    if objections.get(implementation or "triton"):
        # Its products still go to the kernel that was asked for.
        return Choice("layer_input", "xla", objections["triton"] or "")
    shapes = [(layers, channels, columns), (layers, values, columns)]
    if implementation is None and q4_gemv.choose_backend(shapes, batch) == "mosaic":
        return Choice("layer_input", "xla", "the products are faster apart, on tensor cores")
    return choose("layer_input", implementation, objections)


def layer_input(
    w: Any,
    weight_layer: Int32[Array, ""],
    history: Float32[Array, "L B P C"],
    layer: Int32[Array, ""],
    x: Float32[Array, "B D"] | Activations,
    *,
    active: Active | None,
    precision: str,
    keep: bool,
    interpret: bool,
) -> LayerInput:
    """Gates, projections and convolution of one layer of w (stacked `GdnWeights`), the history in place."""
    made = with_limbs(x, precision, interpret=interpret)
    qkv, z = ((matrix.codes, matrix.scales) for matrix in (w.large.qkv, w.large.z))
    return project_in.project_in(
        project_in.InputWeights(qkv, z, b=w.b, a=w.a, conv=w.conv, dt_bias=w.dt_bias, A_log=w.A_log),
        history,
        made.x,
        made.digits,
        made.scales,
        layer=_index(layer),
        weight_layer=_index(weight_layer),
        gates=_GATES,
        active=active,
        keep=keep,
        interpret=interpret,
    )


def choose_layer_gates(rows: int, implementation: str | None) -> Choice:
    """The implementation of a layer's gates alone, for so many rows."""
    return choose("layer_gates", implementation, _objections(project_in.gates_supported, rows))


def layer_gates(
    w: Any, weight_layer: Int32[Array, ""], x: Float32[Array, "M D"], *, interpret: bool
) -> project_in.Gated:
    """The gates of one layer of w (stacked `GdnWeights`), by the kernel."""
    return project_in.project_gates(
        *(x, w.b, w.a, w.dt_bias, w.A_log), weight_layer=_index(weight_layer), gates=_GATES, interpret=interpret
    )


def choose_delta_layer(state: Any, implementation: str | None) -> Choice:
    """The implementation of the delta rule with both norms, for S [L, B, H, K, V] (anything with a shape)."""
    return choose("delta_layer", implementation, _objections(delta_kernels.supported, state))


def choose_delta_chunks(
    v: Any, key_heads: int, key_dim: int, precision: str, implementation: str | None, pieces: int = 1
) -> Choice:
    """The implementation of the delta rule over all tokens of v [T, B, H, V] (anything with a shape), in `pieces`.

    Raises:
        ValueError: an unknown implementation; `pieces` below 1 (TypeError: no integer). UnsupportedError: an unknown
        precision, or a named implementation that cannot do it.
    """
    precision = _chunk_precision(precision)
    shapes = shapes_of_v(v.shape, key_dim, pieces)

    def objection(**how):
        """Of all that is launched, the first."""
        for tokens, batch, heads, columns in shapes:
            sizes = batch, tokens, key_heads, heads, key_dim, columns, precision
            if reason := chunk_kernels.supported(*sizes, **how):
                return reason if len(shapes) == 1 else f"{reason} (in pieces, its V is K + V in one of two passes)"
        return None

    objections = {name: objection(backend=name) for name in ("mosaic", "triton")}
    objections["interpret"] = objection(interpret=True)
    return choose("delta_chunks", implementation, objections)


def delta_chunks(
    s: Float32[Array, "B H K V"],
    q: Float32[Array, "T B G K"],
    k: Float32[Array, "T B G K"],
    v: Float32[Array, "T B H V"],
    beta: Float32[Array, "T B H"],
    g: Float32[Array, "T B H"],
    *,
    precision: str,
    implementation: str | None,
    pieces: int = 1,
) -> tuple[Float32[Array, "T B H V"], Float32[Array, "B H K V"]]:
    """`delta.clean_chunks`, by the kernel where it takes them; "q8" concerns the layer's products alone.

    Under `grad` the kernel still computes o and S; the backward pass is that of `delta_backward`, in plain XLA.
    `pieces`: of every sequence, at the same time; see `delta_pieces`.

    Raises:
        ValueError, TypeError, UnsupportedError: as `choose_delta_chunks`.
    """
    precision = _chunk_precision(precision)
    choice = choose_delta_chunks(v, q.shape[2], q.shape[3], precision, implementation, pieces).implementation
    by_xla = functools.partial(delta.clean_chunks, precision=precision)
    form = by_xla
    if choice != "xla":
        how = {"backend": choice} if choice != "interpret" else {"interpret": True}
        by_kernel = functools.partial(chunk_kernels.delta_chunk, precision=precision, **how)
        form = with_rules(by_kernel, by_xla, implementation)
    return with_backward(in_pieces(form, pieces), precision=precision)(s, q, k, v, beta, g)


def _chunk_precision(precision: str) -> str:
    """The precision of the chunks where the layer's is this one."""
    if precision not in PROMPT_PRECISIONS["q4"]:
        known = ", ".join(PROMPT_PRECISIONS["q4"])
        raise UnsupportedError(f"precision must be one of {known}, got {precision!r}")
    return precision if precision in chunk_kernels.PRECISIONS else "exact"


def delta_layer(
    state: Float32[Array, "L B H K V"],
    layer: Int32[Array, ""],
    xcv: Float32[Array, "B C"],
    z: Float32[Array, "B H V"],
    beta: Float32[Array, "B H"],
    g: Float32[Array, "B H"],
    norm: Float32[Array, "Lw V"],
    weight_layer: Int32[Array, ""],
    *,
    key_heads: int,
    norm_eps: float,
    limbs: int,
    active: Active | None,
    keep: bool,
    interpret: bool,
) -> LayerStep:
    """The delta rule of one layer with both norms, in place; the output as limbs (0: in float32)."""
    return delta_kernels.delta_layer_step(
        state,
        _index(layer),
        xcv,
        z,
        beta,
        g,
        norm,
        key_heads=key_heads,
        qk_eps=QK_EPS,
        eps=norm_eps,
        active=active,
        weight_layer=_index(weight_layer),
        split=_splitter(limbs) if limbs else None,
        limbs=limbs,
        keep=keep,
        interpret=interpret,
    )


def choose_delta_window(state: Any, tokens: int, implementation: str | None) -> Choice:
    """The implementation of the delta rule over a window, for S [L, B, H, K, V] (anything with a shape)."""
    return choose("delta_window", implementation, _objections(window_kernels.supported, state, tokens))


def look_at_window(
    state: Float32[Array, "L B H K V"],
    history: Float32[Array, "L B P C"],
    layer: Int32[Array, ""],
    xc: Float32[Array, "T B C"],
    conv: Float32[Array, "L C W"],
    z: Float32[Array, "T B H V"],
    beta: Float32[Array, "T B H"],
    g: Float32[Array, "T B H"],
    norm: Float32[Array, "L V"],
    lengths: Int32[Array, "B"],
    kept: tuple[Float32[Array, "L T B C"], Float32[Array, "L T B H"], Float32[Array, "L T B H"]],
    *,
    key_heads: int,
    norm_eps: float,
    limbs: int,
    interpret: bool,
) -> tuple[Array | Activations, tuple[Array, Array, Array]]:
    """Convolution, delta rule and both norms of one layer for the tokens of a window, from a state that stays as it is.

    The output [T, B, H, V], or its T·B rows as limbs; and `kept`, with this layer's xc, beta and g put in in place.
    """
    made = window_kernels.delta_window_look(
        *(state, history, _index(layer), xc, conv, z, beta, g, norm),
        weight_layer=_index(layer),
        key_heads=key_heads,
        qk_eps=QK_EPS,
        eps=norm_eps,
        lengths=lengths,
        kept=window_kernels.Kept(*kept),
        split=_splitter(limbs) if limbs else None,
        limbs=limbs,
        interpret=interpret,
    )
    assert made.kept is not None
    return Activations(None, made.digits, made.x_scales) if limbs else made.onn, tuple(made.kept)


def take_window(
    state: Float32[Array, "L B H K V"],
    history: Float32[Array, "L B P C"],
    xc: Float32[Array, "L T B C"],
    conv: Float32[Array, "L C W"],
    beta: Float32[Array, "L T B H"],
    g: Float32[Array, "L T B H"],
    counts: Int32[Array, "B"],
    *,
    key_heads: int,
    interpret: bool,
) -> tuple[Float32[Array, "L B H K V"], Float32[Array, "L B P C"]]:
    """S and history of all layers with the first `counts` tokens of a window taken, in place."""
    return window_kernels.delta_window_fold(
        *(state, history, xc, conv, beta, g, counts), key_heads=key_heads, qk_eps=QK_EPS, interpret=interpret
    )


def choose_attend(keys: Any, heads: int, implementation: str | None) -> Choice:
    """The implementation of what lies between full attention's projections, for `heads` query heads and a cache.

    `keys` [A, B, S, N, Hd] is anything with a shape and a dtype. XLA takes what the kernels do not, under any name.
    """
    objections = _objections(attend_kernels.supported, keys, heads)
    if implementation in IMPLEMENTATIONS and (
        reason := objections.get(implementation, "the kernels have no such form")
    ):
        return Choice("attend", "xla", "asked for by name" if implementation == "xla" else reason)
    return choose("attend", implementation, objections)


def attend_limbs(w: Matrix, keys: Any, heads: int, rows: int, precision: str, implementation: str | None) -> int:
    """Limbs that the kernels are to leave so many rows of full attention's output in, for a product with w; 0: in
    float32.
    """
    head_dim = keys.shape[-1]
    if not isinstance(w, Q4Tensor) or attend_kernels.supported(keys, heads, limbs=LIMBS[precision], interpret=True):
        return 0
    name = _kernel_for((w,), (rows, heads * head_dim), precision, implementation)
    return 0 if name is None else LIMBS[precision]


def attend_from_cache(
    q: Float32[Array, "M Nq both"],
    k: Float32[Array, "M N Hd"],
    v: Float32[Array, "M N Hd"],
    q_norm: Float32[Array, "Lw Hd"],
    k_norm: Float32[Array, "Lw Hd"],
    keys: Array,
    values: Array,
    layer: Int32[Array, ""],
    position: Int32[Array, "M"],
    writes: Active,
    frequencies: Float32[Array, "half"],
    *,
    norm_eps: float,
    limbs: int,
    interpret: bool,
) -> tuple[Array | Activations, Array, Array]:
    """Full attention between its projections, by kernels: q and k made ready, the cache [A, B, S, N, Hd] written in
    place, and the gated output [M, Nq·Hd] as limbs (0: in float32). q has its gate in the second half of each head.
    Row m belongs to sequence m mod B.
    """
    how = {"layer": _index(layer), "position": position, "interpret": interpret}
    placed = attend_kernels.place(
        *(q, k, v, q_norm, k_norm, keys, values),
        weight_layer=_index(layer),
        writes=writes,
        frequencies=frequencies,
        eps=norm_eps,
        **how,
    )
    split = _splitter(limbs) if limbs else None
    made = attend_kernels.attend(placed.q, q, placed.keys, placed.values, split=split, limbs=limbs, **how)
    gated = Activations(None, made.digits, made.x_scales) if limbs else made.o
    return gated, placed.keys, placed.values


def _splitter(limbs: int):
    return functools.partial(group_digits, limbs=limbs)


def delta_step(
    state: Float32[Array, "L B H K V"],
    layer: Int32[Array, ""],
    q: Float32[Array, "B G K"],
    k: Float32[Array, "B G K"],
    v: Float32[Array, "B H V"],
    beta: Float32[Array, "B H"],
    g: Float32[Array, "B H"],
    *,
    implementation: str | None = None,
) -> tuple[Float32[Array, "B H V"], Float32[Array, "L B H K V"]]:
    """The delta rule alone on one layer of a stacked state: o and the next state, in place where it is donated.

    Raises:
        UnsupportedError: a named implementation that cannot do it.
    """
    choice = choose_delta_layer(state, implementation)
    if choice.implementation == "xla":
        o, s = delta.delta_step(lax.dynamic_index_in_dim(state, layer, 0, keepdims=False), q, k, v, beta, g)
        return o, lax.dynamic_update_index_in_dim(state, s, layer, 0)
    return delta_kernels.delta_step(
        state, _index(layer), q, k, v, beta, g, interpret=choice.implementation == "interpret"
    )
