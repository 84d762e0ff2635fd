"""Goldens: what the Gated DeltaNet layers of `transformers` computed in float32, token by token, from recipe weights.

A golden stores outputs and taps only. Its weights, inputs and initial state come from `recipe` by label. Large arrays
are stored as every n-th element of each token and batch row, see `Golden.sample`.
`provenance.json` beside the arrays says how each golden was made.
"""

import dataclasses
import functools
import hashlib
import importlib.resources
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from gdn_jax.config import GdnConfig
from gdn_jax.errors import CheckpointError
from gdn_jax.evidence import recipe

__all__ = ["Golden", "content_sha256", "load", "names", "provenance", "sample"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Golden:
    """One run of T tokens through one layer.

    `source` names the class that computed it, `tokens` is T, `batch` is B. `arrays` holds `ys` at the tokens
    `kept_tokens`, and the taps by name (XC XCV Z Q K A B BETA G ON ONN OUT S HIST) at the tokens `tapped_tokens`; each
    array has the token as its first axis and B as its second. The last tapped token is T - 1, so its S and HIST are the
    final state. Arrays with a stride in `strides` are samples, [tokens, B, n]; all others are whole.
    """

    name: str
    cfg: GdnConfig
    source: str
    tokens: int
    batch: int
    input_kind: str
    weights_label: str
    inputs_label: str
    state_label: str | None
    kept_tokens: tuple[int, ...]
    tapped_tokens: tuple[int, ...]
    strides: Mapping[str, int]
    arrays: Mapping[str, np.ndarray]

    def weights(self) -> dict[str, np.ndarray]:
        """The layer's weights: canonical name -> float32 array."""
        return recipe.layer_weights(self.cfg, self.weights_label)

    def xs(self) -> np.ndarray:
        """The inputs, float32 [T, B, D]."""
        return recipe.inputs(self.input_kind, self.inputs_label, (self.tokens, self.batch, self.cfg.hidden))

    def initial_state(self) -> tuple[np.ndarray, np.ndarray]:
        """The state before the first token, float32: S [B, H, K, V] and the convolution's history [B, W-1, C]."""
        cfg = self.cfg
        if self.state_label is not None:
            return recipe.layer_state(cfg, self.state_label, self.batch)
        S = np.zeros((self.batch, cfg.value_heads, cfg.key_dim, cfg.value_dim), np.float32)
        return S, np.zeros((self.batch, cfg.conv_width - 1, cfg.conv_channels), np.float32)

    def sample(self, name: str, values: np.ndarray) -> np.ndarray:
        """`values` [tokens, B, …], a whole array called `name`, reduced to the elements that the golden keeps of it.

        What `sample` returns has the shape of `arrays[name]`, as far as the tokens agree.
        """
        return sample(values, self.strides.get(name, 1))


def sample(values: np.ndarray, stride: int) -> np.ndarray:
    """Every `stride`-th element of each token and row: [tokens, B, …] -> [tokens, B, n]; a stride of 1 keeps all."""
    return values if stride == 1 else values.reshape(*values.shape[:2], -1)[..., ::stride]


def names() -> tuple[str, ...]:
    """The names that `load` knows, small geometries first."""
    return tuple(provenance()["cases"])


def load(name: str) -> Golden:
    """The golden called `name`, its arrays checked against the digest recorded when they were made.

    Raises:
        ValueError: there is no golden of this name.
        CheckpointError: the file is missing or damaged, or holds other arrays than recorded.
    """
    if name not in names():
        raise ValueError(f"unknown golden {name!r}; there are {', '.join(names())}")
    case = provenance()["cases"][name]
    arrays = _read_arrays(f"{name}.npz")
    digest = content_sha256(arrays)
    if digest != case["sha256"]:
        raise CheckpointError(
            f"golden {name!r} does not hold what was recorded: SHA-256 of its arrays is {digest}, expected "
            f"{case['sha256']}; reinstall the package, or rebuild all goldens with tests/goldens/rebuild.py"
        )
    return Golden(
        name=name,
        cfg=GdnConfig(**case["config"]),
        kept_tokens=tuple(case["kept_tokens"]),
        tapped_tokens=tuple(case["tapped_tokens"]),
        arrays=arrays,
        **{field: case[field] for field in _AS_RECORDED},
    )


_AS_RECORDED = ("source", "tokens", "batch", "input_kind", "weights_label", "inputs_label", "state_label", "strides")


@functools.cache
def provenance() -> dict[str, Any]:
    """How the goldens were made: program, versions, date, and for each case its settings, shapes and digest."""
    return json.loads(_read("provenance.json"))


def content_sha256(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over name, dtype, shape and little-endian bytes of every array, in order of names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        little_endian = array.astype(array.dtype.newbyteorder("<"))
        digest.update(f"{name} {little_endian.dtype.str} {array.shape}\n".encode())
        digest.update(little_endian.tobytes())
    return digest.hexdigest()


def _read(file: str) -> bytes:
    path = importlib.resources.files("gdn_jax.evidence") / "goldens" / file
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"package data {path} is missing; reinstall the package") from None


def _read_arrays(file: str) -> dict[str, np.ndarray]:
    content = _read(file)
    try:
        with np.load(io.BytesIO(content)) as archive:
            return dict(archive)
    except Exception as error:  # damage shows as any of a dozen types, from zipfile, zlib, struct or numpy
        raise CheckpointError(f"golden file {file} cannot be read ({error}); reinstall the package") from error
