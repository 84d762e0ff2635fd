"""What a benchmark was asked for."""

import dataclasses

from gdn_jax.bench.timing import Effort
from gdn_jax.config import GdnConfig

__all__ = ["Request"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The cases of one run: every combination of `batches` with `shapes` (gemv) or with the geometry (delta, layer)."""

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
