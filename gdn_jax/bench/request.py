"""What a benchmark was asked for."""

import dataclasses

from gdn_jax.bench.timing import Effort
from gdn_jax.config import GdnConfig
from gdn_jax.decoder.config import DecoderConfig

__all__ = ["Request"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The cases of one run: every combination of `batches` with `shapes` (gemv, gemm) or the geometry (others)."""

    batches: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    """Rows and columns of matrices."""
    geometry: str
    """What to call `cfg` in a table."""
    cfg: GdnConfig
    layers: int
    """Layers of the stack that is rotated through."""
    precisions: tuple[str, ...]
    implementation: str | None
    """None: what the library would choose."""
    peers: bool
    effort: Effort
    lengths: tuple[int, ...] = ()
    """Tokens of sequences; the subject that has them takes every combination with `batches`."""
    pieces: int = 1
    """Of every sequence, that are computed at the same time; a sequence has no more of them than chunks."""
    backward: bool = False
    """Whether to time sequences with their gradients too."""
    decoder: DecoderConfig | None = None
    """The whole model that `cfg` is part of, where the subject is one; what follows is about it alone."""
    tier: str = "q4"
    context: int = 1024
    """Tokens that a sequence has room for."""
    tokens: int = 32
    """Steps of one program, or the length of a prompt."""
    kv_dtype: str = "float32"
    parts: bool = True
    """Whether to time the parts of a step too."""
