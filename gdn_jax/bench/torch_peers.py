"""Peers in PyTorch, in a process of their own: `python -m gdn_jax.bench.torch_peers {int4|fla|fla_chunk} [CASE]`.

CASE is the case as JSON, with `rotate`, `seconds` and `warm` of the effort. Prints one line of JSON: bytes, error, and
the times of CUDA-graph replays; without the times where the result is wrong or the case cannot be taken. fla_chunk
without CASE answers cases as `dialogue.answer_lines` does.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gdn_jax.bench import gate
from gdn_jax.bench.dialogue import answer_lines

__all__ = ["main"]

_GROUP = 32
_KERNELS = 128
_ROUNDS = 9
_ENDS = 256
"""Tokens at both ends of a sequence that are held to float64."""
_GRADED = 130
"""Tokens at the beginning whose gradients are held to float64: two chunks and a part of one."""
_TOKENS = 1 << 16
"""Of all launches of one graph together."""


def main(which: str, *case: str) -> None:
    """Measure one case of one peer, or those that come."""
    torch = importlib.import_module("torch")
    measure = {"int4": _int4, "fla": _fla, "fla_chunk": _fla_chunk}[which]

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        return {**measure(torch, case), "torch": torch.__version__}

    if case:
        print(json.dumps(answer(json.loads(*case))))
    else:
        importlib.import_module("fla.ops.gated_delta_rule")  # which takes a while
        answer_lines(answer)


def _int4(torch: Any, case: dict[str, Any]) -> dict[str, Any]:
    """`_weight_int4pack_mm` ("tinygemm"): bfloat16 x, weights (code - 8) · scale + zero in groups of 32."""
    rows, columns, batch = case["rows"], case["columns"], case["batch"]
    if rows % 8 or columns % 128:
        return {"note": "it takes rows in multiples of 8 and columns in multiples of 128"}
    one = rows * columns // 2 + 4 * rows * columns // _GROUP
    layers = max(2, math.ceil(case["rotate"] / one))
    torch.manual_seed(1)
    chosen = gate.sample(rows)
    packed, tables, last = [], [], ()
    for _ in range(layers):
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device="cuda")
        scales = (torch.rand(columns // _GROUP, rows, device="cuda") * (2 / 3) + 2 / 3).bfloat16()
        # Two codes to a byte, the even column in the high half.
        packed.append(torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8))
        tables.append(torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous())
        last = (codes[chosen].cpu().numpy().astype(np.int8) - 8, scales[:, chosen].double().cpu().numpy().T)
    x = torch.distributions.StudentT(3.0).sample((batch, columns)).cuda()
    rounded = x.bfloat16()

    def launch(layer: int) -> Any:
        return torch.ops.aten._weight_int4pack_mm(rounded, packed[layer], _GROUP, tables[layer])

    y = launch(layers - 1)
    error = gate.product_error(y.double().cpu().numpy()[:, chosen], gate.unpacked(*last), x.double().cpu().numpy())
    nbytes = one + 2 * batch * (rows + columns)
    return _timed(torch, case, launch, layers, nbytes, error, gate.BOUNDS["gemv", "bf16"])


def _fla(torch: Any, case: dict[str, Any]) -> dict[str, Any]:
    """`fused_recurrent_gated_delta_rule` of flash-linear-attention on one token: float32, a new state every time."""
    fla = importlib.import_module("fla")
    rule = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    batch, key_heads, heads = case["batch"], case["key_heads"], case["value_heads"]
    key_dim, value_dim = case["key_dim"], case["value_dim"]
    one = 4 * batch * heads * key_dim * value_dim
    layers = max(2, math.ceil(case["rotate"] / one))
    torch.manual_seed(1)
    states = [torch.randn(batch, heads, key_dim, value_dim, device="cuda") / 4 for _ in range(layers)]
    q, k = torch.nn.functional.normalize(torch.randn(2, batch, 1, key_heads, key_dim, device="cuda"), dim=-1)
    q = q * key_dim**-0.5
    v = torch.randn(batch, 1, heads, value_dim, device="cuda")
    beta = torch.rand(batch, 1, heads, device="cuda")
    g = -torch.rand(batch, 1, heads, device="cuda")

    def launch(layer: int) -> Any:
        with torch.no_grad():
            return rule(q, k, v, g=g, beta=beta, scale=1.0, initial_state=states[layer], output_final_state=True)

    o, after = launch(layers - 1)
    rows = sorted({0, batch - 1})
    o, after, before = (array[rows].double().cpu().numpy() for array in (o[:, 0], after, states[-1]))
    inputs = tuple(array[rows, 0].double().cpu().numpy() for array in (q, k, v, beta, g))
    error = gate.delta_error(o, after, before, inputs)
    nbytes = 2 * one + 4 * sum(array.numel() for array in (q, k, v, v, beta, g))
    measured = _timed(torch, case, launch, layers, nbytes, error, gate.BOUNDS["delta", "f32"])
    return {**measured, "fla": getattr(fla, "__version__", None)}


def _fla_chunk(torch: Any, case: dict[str, Any]) -> dict[str, Any]:
    """`chunk_gated_delta_rule` of flash-linear-attention: q, k, v and o in bfloat16, all else in float32.

    With `backward` in the case its gradients too, by its own kernels.
    """
    fla = importlib.import_module("fla")
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    batch, tokens, key_heads, heads = (case[name] for name in ("batch", "tokens", "key_heads", "value_heads"))
    key_dim, value_dim = case["key_dim"], case["value_dim"]
    torch.manual_seed(1)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda")

    q, k = torch.nn.functional.normalize(normal(2, batch, tokens, key_heads, key_dim), dim=-1)
    q, k, v = (x.bfloat16() for x in (q * key_dim**-0.5, k, normal(batch, tokens, heads, value_dim)))
    beta = torch.sigmoid(normal(batch, tokens, heads))
    rate, bias = (torch.rand(heads, device="cuda") * (high - low) + low for low, high in ((-4.6, 2.8), (-7.0, 1.0)))
    g = -torch.exp(rate) * torch.nn.functional.softplus(normal(batch, tokens, heads) + bias)
    state = normal(batch, heads, key_dim, value_dim) / 4

    def over(span: slice, state: Any) -> Any:
        """o and S of some of the tokens, from that state."""
        with torch.no_grad():
            part = (x[:, span] for x in (q, k, v, g, beta))
            return rule(*part, scale=1.0, initial_state=state, output_final_state=True)

    do, ds = normal(batch, tokens, heads, value_dim).bfloat16(), normal(*state.shape)

    def with_gradients(span: slice) -> tuple[Any, ...]:
        """Those of the state and of q, k, v, beta, g in some of the tokens, which alone make o and S."""
        leaves = [x.detach().requires_grad_() for x in (state, *(x[:, span] for x in (q, k, v, beta, g)))]
        s, *part, of_beta, of_g = leaves
        results = rule(*part, g=of_g, beta=of_beta, scale=1.0, initial_state=s, output_final_state=True)
        return torch.autograd.grad(results, leaves, (do[:, span], ds))

    def on_host(x: Any) -> np.ndarray:
        return x[sorted({0, batch - 1})].double().cpu().numpy()

    def exactly(span: slice, state: Any) -> tuple[np.ndarray, np.ndarray]:
        """The same in float64."""
        return gate.serial_delta(on_host(state), *(np.moveaxis(on_host(x[:, span]), 1, 0) for x in (q, k, v, beta, g)))

    every, first, last = slice(None), slice(_ENDS), slice(max(0, tokens - _ENDS), None)
    o, after = over(every, state)
    found = [*(np.moveaxis(on_host(o[:, span]), 1, 0) for span in (first, last)), on_host(after)]
    middle = over(slice(last.start), state)[1] if last.start else state
    expected = [exactly(first, state)[0], *exactly(last, middle)]
    nbytes = sum(x.nbytes for x in (q, k, v, v, beta, g, state, state))
    subject, launch = "chunk", lambda _: over(every, state)
    if case["backward"]:
        # Of every array that is read or written its gradient is written or read.
        subject, nbytes, launch = "chunk backward", 2 * nbytes, lambda _: with_gradients(every)
        of_state, *of_tokens = map(on_host, with_gradients(slice(_GRADED)))
        found += [of_state, *(np.moveaxis(x, 1, 0) for x in of_tokens)]
        given = (np.moveaxis(on_host(x[:, :_GRADED]), 1, 0) for x in (do, q, k, v, beta, g))
        expected += gate.serial_delta_gradients(next(given), on_host(ds), on_host(state), *given)
    error, rms = gate.chunk_errors(found, expected, "bf16", subject)
    launches = max(8, min(_KERNELS, _TOKENS // (batch * tokens)))
    measured = _timed(torch, case, launch, 1, nbytes, error, gate.BOUNDS[subject, "bf16"], launches)
    return {**measured, "rms_rel": rms, "version": f"flash-linear-attention {fla.__version__}"}


def _timed(
    torch: Any,
    case: dict[str, Any],
    launch: Callable[[int], Any],
    layers: int,
    nbytes: int,
    error: float,
    bound: float,
    launches: int = _KERNELS,
) -> dict[str, Any]:
    """Microseconds per launch over replays of a graph that goes round the layers, if the error keeps to its bound."""
    measured = {"nbytes": nbytes, "max_rel": error, "layers": layers}
    if not error <= bound:
        return measured
    kernels = math.ceil(launches / layers) * layers
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):  # a capture wants everything compiled and allocated before
        for layer in range(layers):
            launch(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(kernels):
            launch(i % layers)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        """Milliseconds of one replay."""
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    warmed = 0.0
    while warmed < 1e3 * case["warm"]:
        warmed += replay()
    taken: list[float] = []
    while len(taken) < _ROUNDS or sum(taken) < 1e3 * case["seconds"]:
        taken.append(replay())
    low, median, high = np.percentile(np.array(taken) * 1e3 / kernels, (10, 50, 90))
    times = {"us": median, "us_p10": low, "us_p90": high, "us_with_glue": median, "kernels": kernels}
    return {**measured, **times, "rounds": len(taken)}


if __name__ == "__main__":
    main(*sys.argv[1:])
