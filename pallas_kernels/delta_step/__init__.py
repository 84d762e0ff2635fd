"""One token of the gated delta rule on a stacked state, in place."""

from pallas_kernels.delta_step.host import delta_layer_step, delta_step, supported
from pallas_kernels.delta_step.tuning import Tiles

__all__ = ["Tiles", "delta_layer_step", "delta_step", "supported"]
