"""The input half of a GDN layer in one launch: projections, convolution, gates. See README.md beside this file."""

from pallas_kernels.project_in.host import (
    Gated,
    Gates,
    InputWeights,
    LayerInput,
    gates_supported,
    project_gates,
    project_in,
    supported,
)

__all__ = [
    "Gated",
    "Gates",
    "InputWeights",
    "LayerInput",
    "gates_supported",
    "project_gates",
    "project_in",
    "supported",
]
