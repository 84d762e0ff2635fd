"""What one lane of a Mosaic kernel does with its registers, as LLVM values: what such kernels have in common."""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, vector

__all__ = ["BaseLane", "elements"]


class BaseLane:
    """To and from the registers of an array, and arithmetic in float32."""

    @staticmethod
    def element(register, i: int):
        """Element i of a register that is a vector."""
        return vector.extract(register, dynamic_position=[], static_position=[i])

    @staticmethod
    def vector(values):
        """A register of float32 elements."""
        return vector.from_elements(ir.VectorType.get((len(values),), ir.F32Type.get()), list(values))

    @staticmethod
    def array(registers, like):
        """The array whose registers these are, laid out as another."""
        registers = np.fromiter(registers, object).reshape(like.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=like.is_signed)

    @staticmethod
    def float(value):
        """A float32 of an int32 or a float16."""
        convert = arith.sitofp if isinstance(value.type, ir.IntegerType) else arith.extf
        return convert(ir.F32Type.get(), value)

    @staticmethod
    def times_plus(a, b, c):
        """a · b + c in one rounding."""
        return math.fma(a, b, c)


def elements(lane: Any, array: Any) -> np.ndarray:
    """The elements that a lane has of an array, in the order of its registers; `lane` takes registers apart."""
    length = array.layout.vector_length
    return np.fromiter((lane.element(reg, i) for reg in array.registers.flat for i in range(length)), object)
