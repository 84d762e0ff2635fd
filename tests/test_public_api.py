"""The public surface: what is there, what importing it costs, and how its functions are called."""

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import gdn_jax as gdn
from tests.support import cases

# Documented names; a later release may add to them, and may not take one away.
NAMES = {
    *("GEOMETRIES", "GdnConfig", "GdnStack", "GdnState", "GdnWeights", "Snapshot", "abstract", "branch", "errors"),
    *("from_canonical", "history_from_window", "implementation_report", "init_state", "load_config", "load_layer"),
    *("load_stack", "merge", "reset", "restore", "scan", "select", "snapshot", "state_nbytes", "step", "tap_shapes"),
    *("trace", "DECODERS", "Conversation", "Decoder", "DecoderConfig", "DecoderState", "DecoderWeights"),
    *("GenerateResult", "SamplingParams", "decode_step", "init_decoder_state", "load_decoder", "prefill_tokens"),
    *("prefill", "PrefixCache", "PrefixCacheStats", "fingerprint", "load_state", "resize", "save_state"),
    *("Window", "commit_window", "verify_window", "DraftCounts", "Drafter", "Drafting", "Proposal", "draft_by_model"),
    *("draft_by_mtp", "draft_by_ngrams"),
}
TABLES = {"GEOMETRIES", "DECODERS"}
LAYER_FUNCTIONS = (gdn.step, gdn.scan, gdn.trace)


def test_names():
    assert set(gdn.__all__) >= NAMES
    assert len(set(gdn.__all__)) == len(gdn.__all__)
    assert set(dir(gdn)) == set(gdn.__all__)


@pytest.mark.parametrize("name", gdn.__all__)
def test_every_name_resolves_to_something_documented(name):
    value = getattr(gdn, name)
    assert name in TABLES or inspect.getdoc(value)
    assert getattr(gdn, name) is value


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'gdn_jax' has no attribute 'Chunk'"):
        gdn.Chunk  # noqa: B018


def test_importing_the_package_imports_nothing_heavy():
    """Nor does asking for a configuration or an error start a backend or read a checkpoint format."""
    program = (
        "import sys, gdn_jax; "
        "assert not {'jax', 'numpy', 'flax', 'orbax', 'safetensors', 'gguf'} & set(sys.modules); "
        "gdn_jax.GdnConfig, gdn_jax.errors.GdnError; "
        "assert not {'orbax', 'gguf', 'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("function", LAYER_FUNCTIONS)
def test_signatures(function):
    """At most three positional arrays, all else by keyword with the documented defaults, and no catch-all."""
    parameters = inspect.signature(function).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["w", "state", "xs" if function is gdn.scan else "x"]
    keywords = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {
        "cfg": inspect.Parameter.empty, "layer": 0, "active": None, "precision": "exact", "implementation": None
    }  # fmt: skip
    assert len(parameters) == len(positional) + len(keywords)


@pytest.mark.parametrize("name", ["step", "scan", "trace"])
def test_functions_are_neither_jitted_nor_donating(name):
    function = getattr(gdn, name)
    assert inspect.isfunction(function)
    state = cases.random_state(cases.SMALL, layers=1, batch=2)
    x = cases.inputs(cases.SMALL, 2)
    function(cases.weights(cases.SMALL), state, x[None] if name == "scan" else x, cfg=cases.SMALL)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_the_documented_jit_line_works():
    line = 'jax.jit(gdn.step, static_argnames=("cfg", "precision", "implementation"), donate_argnames=("state",))'
    assert line in (inspect.getdoc(gdn.step) or "")
    step = eval(line, {"jax": jax, "gdn": gdn})
    cfg = cases.SMALL
    state = gdn.init_state(cfg, layers=2, batch=2)
    y, state = step(cases.weights(cfg), state, cases.inputs(cfg, 2), cfg=cfg, layer=jnp.int32(1), precision="exact")
    assert (y.shape, y.dtype) == ((2, cfg.hidden), jnp.float32)
    assert isinstance(state, gdn.GdnState)


def test_errors_form_one_tree():
    errors = gdn.errors
    for error in (errors.CheckpointError, errors.StalePoolError, errors.StateMismatchError, errors.UnsupportedError):
        assert issubclass(error, errors.GdnError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.StateMismatchError, ValueError)
    assert issubclass(errors.CheckpointError, ValueError)


def test_the_report_names_an_implementation_and_a_reason_for_every_operation():
    report = gdn.implementation_report()
    assert report
    assert all(choice.implementation in ("xla", "mosaic", "triton") and choice.reason for choice in report)
    assert len({choice.operation for choice in report}) == len(report)


def test_abstract_is_the_shape_of_real_weights():
    for cfg in (case.cfg for case in cases.CASES):
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), gdn.abstract(cfg))
        assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cases.weights(cfg))
    stacked = gdn.abstract(cases.SMALL, layers=48)
    assert stacked.large.qkv.shape == (48, cases.SMALL.conv_channels, cases.SMALL.hidden)


def test_published_geometries():
    """G, H, D and the number of GDN layers as published; K = V = 128 and W = 4 throughout."""
    found = {n: (g.cfg.key_heads, g.cfg.value_heads, g.cfg.hidden, g.layers) for n, g in gdn.GEOMETRIES.items()}
    assert found == {
        "qwen3.5-0.8b": (16, 16, 1024, 18),
        "qwen3.5-2b": (16, 16, 2048, 18),
        "qwen3.5-4b": (16, 32, 2560, 24),
        "qwen3.5-9b": (16, 32, 4096, 24),
        "qwen3.5-27b": (16, 48, 5120, 48),
        "qwen3-next-80b": (16, 32, 2048, 36),
    }
    for geometry in gdn.GEOMETRIES.values():
        assert (geometry.cfg.key_dim, geometry.cfg.value_dim, geometry.cfg.conv_width) == (128, 128, 4)


@pytest.mark.parametrize("name", gdn.GEOMETRIES)
def test_a_configuration_survives_the_way_to_hugging_face_and_back(name):
    geometry = gdn.GEOMETRIES[name]
    assert gdn.GdnConfig.from_hf(geometry.cfg.to_hf(layers=geometry.layers)) == geometry.cfg
