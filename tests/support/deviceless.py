"""Compile for an H200 on a machine without a GPU. Needs the CUDA wheels of the `deviceless` group, no driver."""

import pathlib
import re

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

# Written by XLA on the card itself, beside its dumps.
_TARGET = pathlib.Path(__file__).parent.parent / "data" / "h200.gpu_target_config.pbtxt"


def compile_for_h200(jitted, *args, **kwargs):
    """The compiled program of a jitted function for arguments given as shapes (`jax.ShapeDtypeStruct` leaves)."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=_TARGET.read_text(), topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    placed = NamedSharding(mesh, PartitionSpec())

    def place(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)
        return leaf

    with jax.set_mesh(mesh):
        lowered = jitted.lower(*jax.tree.map(place, args), **jax.tree.map(place, kwargs))
        # The flag that the tests set for real cards leaves the compiler without a version of a dot to fall back on.
        return lowered.compile(compiler_options={"xla_gpu_deterministic_ops": False})


def float_sums(compiled):
    """Every float32 sum of a program: the types, with layouts, of what is summed and of the result, and the axes.

    A sum over the same array in another layout runs in another order, and rounds differently.
    """
    text = compiled.as_text()
    types = dict(re.findall(r"(%[\w.\-]+) = (f32\S+) ", text))
    sums = re.findall(r"= (f32\S+) reduce\((%[\w.\-]+), %[\w.\-]+\), dimensions=(\{[\d,]*\})", text)
    return {(types[operand], result, axes) for result, operand, axes in sums}
