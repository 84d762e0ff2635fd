"""A whole decoder in float64 numpy, one prompt at a time, from canonical tensors; written from the formulas alone."""

import numpy as np

from gdn_jax.evidence import oracle


def run(cfg, tensors, ids):
    """Logits [T, vocab] of the tokens `ids` [T]; `tensors` by canonical name, in any real dtype."""
    return hidden(cfg, tensors, ids) @ _head(cfg, _exact(tensors)).T


def hidden(cfg, tensors, ids):
    """What the head is applied to [T, D], after the final norm."""
    w = _exact(tensors)
    x = w["embed_tokens.weight"][ids]
    for layer, (mixer, mlp) in enumerate(zip(cfg.layer_types, cfg.mlp_types, strict=True)):
        x = _layer(cfg, _below(w, f"layers.{layer}."), mixer, mlp, x)
    return _norm(x, w["norm.weight"], cfg)


def mtp(cfg, tensors, ids, before):
    """The multi-token-prediction head on pairs of a token, `ids` [n], and the hidden state before it, `before` [n, D].

    Hidden states [n, D] of its own, and logits [n, vocab].
    """
    w = _exact(tensors)
    own = _below(w, "mtp.")
    embedding = own.get("embed_tokens.weight", w["embed_tokens.weight"])[ids]
    left, right = np.split(own["fc.weight"], 2, axis=1)
    x = _norm(embedding, own["pre_fc_norm_embedding.weight"], cfg) @ left.T
    x = x + _norm(before, own["pre_fc_norm_hidden.weight"], cfg) @ right.T
    x = _layer(cfg, _below(own, "layers.0."), "full_attention", "dense" if cfg.moe is None else "moe", x)
    made = _norm(x, own["norm.weight"], cfg)
    return made, made @ own.get("lm_head.weight", _head(cfg, w)).T


def _exact(tensors):
    return {name: np.asarray(tensor).astype(np.float64) for name, tensor in tensors.items()}


def _below(w, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}


def _head(cfg, w):
    return w["embed_tokens.weight" if cfg.tied else "lm_head.weight"]


def _layer(cfg, own, mixer, mlp, x):
    h = _norm(x, own["input_layernorm.weight"], cfg)
    x = x + (_gdn(cfg.gdn, own, h) if mixer == "linear_attention" else _attention(cfg, own, h))
    h = _norm(x, own["post_attention_layernorm.weight"], cfg)
    return x + (_mlp(own, "mlp", h) if mlp == "dense" else _moe(cfg.moe, own, h))


def _norm(x, weight, cfg):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + cfg.norm_eps) * (1 + weight)


def _gdn(cfg, own, xs):
    weights = {n.removeprefix("linear_attn."): t for n, t in own.items() if n.startswith("linear_attn.")}
    sizes = {name: getattr(cfg, name) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "norm_eps")}
    return oracle.run_layer(weights, xs[:, None], **sizes).ys[:, 0]


def _attention(cfg, own, xs):
    tokens, ratio = len(xs), cfg.heads // cfg.kv_heads
    w = {n.removeprefix("self_attn."): t for n, t in own.items() if n.startswith("self_attn.")}
    both = (xs @ w["q_proj.weight"].T).reshape(tokens, cfg.heads, 2, cfg.head_dim)
    k, v = ((xs @ w[f"{m}_proj.weight"].T).reshape(tokens, cfg.kv_heads, cfg.head_dim) for m in "kv")
    q = _rope(_norm(both[:, :, 0], w["q_norm.weight"], cfg), cfg)
    k = _rope(_norm(k, w["k_norm.weight"], cfg), cfg)
    o = np.empty_like(q)
    for t in range(tokens):
        for head in range(cfg.heads):
            scores = k[: t + 1, head // ratio] @ q[t, head] / np.sqrt(cfg.head_dim)
            shares = np.exp(scores - scores.max())
            o[t, head] = shares / shares.sum() @ v[: t + 1, head // ratio]
    return (o * _sigmoid(both[:, :, 1])).reshape(tokens, -1) @ w["o_proj.weight"].T


def _rope(x, cfg):
    """Pairs (i, i + rd/2) as complex numbers, turned by position · theta^(-2i/rd)."""
    half = cfg.rotary_dim // 2
    angles = np.arange(len(x))[:, None, None] * cfg.rope_theta ** (-2 * np.arange(half) / cfg.rotary_dim)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def _mlp(own, prefix, x):
    gate, up, down = (own[f"{prefix}.{m}_proj.weight"] for m in ("gate", "up", "down"))
    inner = x @ gate.T
    return (inner * _sigmoid(inner) * (x @ up.T)) @ down.T


def _moe(moe, own, xs):
    scores = xs @ own["mlp.gate.weight"].T
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    ys = _sigmoid(xs @ own["mlp.shared_expert_gate.weight"].T) * _mlp(own, "mlp.shared_expert", xs)
    for t, row in enumerate(shares):
        chosen = np.argsort(-row)[: moe.experts_per_token]
        total = row[chosen].sum() if moe.norm_topk else 1
        for expert in chosen:
            ys[t] += row[expert] / total * _mlp(own, f"mlp.experts.{expert}", xs[t])
    return ys


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))
