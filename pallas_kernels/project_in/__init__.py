"""The input half of a GDN layer in one launch: projections, convolution, gates. See README.md beside this file."""

from pallas_kernels.project_in.host import Gates, InputWeights, LayerInput, project_in, supported

__all__ = ["Gates", "InputWeights", "LayerInput", "project_in", "supported"]
