"""One token of the gated delta rule on a stacked state, in place."""

from pallas_kernels.delta_step.host import LayerStep, delta_layer_step, delta_step, supported
from pallas_kernels.delta_step.tuning import Tiles

__all__ = ["LayerStep", "Tiles", "delta_layer_step", "delta_step", "supported"]
