"""A model saved by transformers, converted both ways: the same q4 layers whichever way they came."""

import chex
import pytest

import gdn_jax as gdn
from gdn_jax import cli
from gdn_jax.convert import convert
from tests.support.paths import FIXTURES, Q4ABLE

SOURCE = FIXTURES / Q4ABLE


@pytest.mark.slow
@pytest.mark.parametrize("quantiser", ["absmax", "q4_0", "mse"])
def test_every_route_gives_the_same_q4_layers(tmp_path, quantiser):
    routes = {
        "straight to GGUF": [(SOURCE, "a.gguf", "q4")],
        "straight to Orbax": [(SOURCE, "a", "q4")],
        "GGUF, then Orbax": [(SOURCE, "b.gguf", "q4"), ("b.gguf", "b", "q4")],
        "float GGUF, then q4 Orbax": [(SOURCE, "c.gguf", "f32"), ("c.gguf", "c", "q4")],
        "Orbax, then GGUF": [(SOURCE, "d", "q4"), ("d", "d.gguf", "q4")],
    }
    wanted = gdn.load_stack(SOURCE, tier="q4", quantiser=quantiser)
    for name, legs in routes.items():
        for source, destination, tier in legs:
            convert(tmp_path / source, tmp_path / destination, tier=tier, quantiser=quantiser)
        found = gdn.load_stack(tmp_path / legs[-1][1], tier="q4", quantiser=quantiser)
        chex.assert_trees_all_equal(found.layers.large, wanted.layers.large, custom_message=name)
        # A_log and the model's norms cannot survive GGUF to the last bit; the GDN norm, conv and gates do.
        for field in ("a", "b", "conv", "dt_bias", "norm"):
            chex.assert_trees_all_equal(getattr(found.layers, field), getattr(wanted.layers, field))
        chex.assert_trees_all_close(found.layers.A_log, wanted.layers.A_log, rtol=1.2e-7, atol=1.2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["hf", "model.gguf", "orbax"])
def test_check_passes_in_tier_q4_on_every_route(capsys, tmp_path, route):
    path = SOURCE
    if route != "hf":
        path = tmp_path / route
        convert(SOURCE, path, tier="q4")
    status = cli.main(["check", "--model", str(path), "--tier", "q4", "--layer", "3", "--batch", "3"])
    assert status == 0, capsys.readouterr().out
