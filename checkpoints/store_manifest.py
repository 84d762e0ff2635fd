"""The manifest of a converted checkpoint: what it holds, what it was made from, and how to tell that it is whole.

`manifest.json` is one JSON object:

    format, version    which kind of directory this is
    tier, q4_parts     "f32" or "q4"; what is in 4 bits, see `Q4_PARTS`, null in tier f32
    quantiser          the rule that quantised, null where none did
    config             the flat text configuration
    provenance         the source and the library versions
    texts              file name -> sha256 of the files of `text_files` that lie beside the manifest
    tensors            canonical name -> shape, dtype, item, sha256 of the content, and what quantisation cost
    sha256             of everything else, see `sealed_json`

It is written last: a directory without a manifest is not a checkpoint.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from checkpoints.base import TensorInfo
from checkpoints.errors import CheckpointError
from checkpoints.hf_config import gdn_dims, gdn_layers, text_config
from checkpoints.names import Vocabulary, gdn_prefix, gdn_shapes, is_linear, is_mtp, mtp_objection
from checkpoints.orbax_item import DENSE_DTYPES, Q4_0
from checkpoints.q4_blocks import GROUP
from checkpoints.sealed_json import decode_sealed, encode_sealed
from checkpoints.text_files import TEXT_FILES, digest

__all__ = [
    "LARGE_PROJECTIONS",
    "MANIFEST_FILE",
    "Q4_PARTS",
    "TIERS",
    "Manifest",
    "Record",
    "is_large",
    "item_infos",
    "make_header",
    "must_be_q4",
]

MANIFEST_FILE = "manifest.json"
FORMAT = "gdn-jax converted checkpoint"
VERSION = 2
TIERS = ("f32", "q4")

LARGE_PROJECTIONS = ("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight")
"""The tensors of a GDN layer whose form the tier decides: all three or none."""

Q4_PARTS = ("all", "gdn")
"""What tier q4 makes 4-bit: every linear layer whose columns are a multiple of 32, or those of GDN layers alone."""

_HEADER_KEYS = frozenset({"format", "version", "tier", "q4_parts", "quantiser", "config", "provenance", "texts"})
_RECORD_KEYS = frozenset({"shape", "dtype", "item", "sha256"})

# Far beyond any tensor; a larger one must not decide how much work it takes to find that it is not there.
_MAX_ELEMENTS = 1 << 38

_ITEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Record(NamedTuple):
    """One tensor: its canonical shape and stored dtype, the item that holds it, the hash of its content.

    `quantisation` says what quantising cost, where the conversion did it.
    """

    shape: tuple[int, ...]
    dtype: str
    item: str
    sha256: str
    quantisation: Mapping[str, float] | None = None

    @property
    def info(self) -> TensorInfo:
        """What `Checkpoint.info` says of it."""
        return TensorInfo(self.shape, self.dtype)

    def as_json(self) -> dict[str, Any]:
        """The record as it stands in the file."""
        entry = self._asdict() | {"shape": list(self.shape)}
        return {key: value for key, value in entry.items() if value is not None}

    @classmethod
    def from_json(cls, entry: Any) -> "Record":
        """The inverse of `as_json`.

        Raises:
            CheckpointError: `entry` is not a record; the message says what is wrong, not where.
        """
        if not isinstance(entry, dict) or not _RECORD_KEYS <= entry.keys() <= {*_RECORD_KEYS, "quantisation"}:
            raise CheckpointError(f"a record must have the keys {', '.join(sorted(_RECORD_KEYS))}, got {entry!r:.100}")
        shape, dtype, item, sha256 = entry["shape"], entry["dtype"], entry["item"], entry["sha256"]
        if not isinstance(shape, list) or len(shape) > 8 or any(type(n) is not int or n < 1 for n in shape):
            raise CheckpointError(f"shape must be at most 8 positive integers, got {shape!r:.100}")
        if math.prod(shape) > _MAX_ELEMENTS:
            raise CheckpointError(f"shape must have at most {_MAX_ELEMENTS} elements, got {shape}")
        if dtype != Q4_0 and (not isinstance(dtype, str) or dtype not in DENSE_DTYPES):
            raise CheckpointError(f"dtype must be {Q4_0} or one of {', '.join(DENSE_DTYPES)}, got {dtype!r:.100}")
        if dtype == Q4_0 and (len(shape) not in (2, 3) or shape[-1] % GROUP):
            raise CheckpointError(f"{Q4_0} needs shape [N, I] or [E, N, I], I a multiple of {GROUP}, got {shape}")
        if not isinstance(item, str) or not _ITEM.fullmatch(item):
            raise CheckpointError(f"item must be a plain directory name, got {item!r:.100}")
        _check_sha256("sha256", sha256)
        return cls(tuple(shape), dtype, item, sha256, entry.get("quantisation"))


def is_large(name: str) -> bool:
    """Whether a canonical name is that of one of `LARGE_PROJECTIONS`."""
    prefix, _, part = name.partition(".linear_attn.")
    return bool(prefix) and part in LARGE_PROJECTIONS


def must_be_q4(name: str, shape: tuple[int, ...], parts: str) -> bool:
    """Whether tier q4 with `parts` of `Q4_PARTS` demands that this tensor be in 4 bits.

    A GDN layer is 4-bit as a whole or not at all, so that its columns are no excuse; other layers are as they can be.
    """
    return is_large(name) or (parts == "all" and is_linear(name) and shape[-1] % GROUP == 0)


def make_header(
    *,
    tier: str,
    q4_parts: str | None,
    quantiser: str | None,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    texts: Mapping[str, bytes],
) -> dict[str, Any]:
    """What identifies a conversion: two with the same header give the same checkpoint. `texts` are file contents."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "tier": tier,
        "q4_parts": q4_parts,
        "quantiser": quantiser,
        "config": dict(config),
        "provenance": dict(provenance),
        "texts": {name: digest(data) for name, data in texts.items()},
    }


class Manifest(NamedTuple):
    """A whole manifest: `header` as of `make_header`, and a record per tensor."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Record]

    def encoded(self) -> bytes:
        """The file's bytes."""
        tensors = {name: record.as_json() for name, record in self.tensors.items()}
        body = {**self.header, "tensors": tensors}
        return encode_sealed(body)

    @classmethod
    def decoded(cls, data: bytes, source: str) -> "Manifest":
        """The manifest in `data`, checked against its seal, its own configuration and the rules of its tier.

        Raises:
            CheckpointError: another format or version, damage, or tensors that are not those of the model.
        """
        body = decode_sealed(
            data,
            source,
            kind="converted checkpoint",
            format=FORMAT,
            version=VERSION,
            remedy="convert the source again",
        )
        if body.keys() != _HEADER_KEYS | {"tensors"} or not isinstance(body["tensors"], dict):
            raise CheckpointError(f"{source}: expected the keys {', '.join(sorted(_HEADER_KEYS))} and tensors")
        tensors = {name: _record(entry, f"{source}: tensor {name!r}") for name, entry in body.pop("tensors").items()}
        manifest = cls(body, tensors)
        try:
            manifest._check()
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None
        return manifest

    def _check(self) -> None:
        if self.header["tier"] not in TIERS:
            raise CheckpointError(f"tier must be one of {', '.join(TIERS)}, got {self.header['tier']!r:.40}")
        self._check_texts()
        config = text_config(self.header["config"])
        vocabulary, shapes = Vocabulary(config), gdn_shapes(gdn_dims(config))
        of_head = mtp_objection(filter(is_mtp, self.tensors))
        for name in self.tensors:
            if objection := of_head if is_mtp(name) else vocabulary.objection(name):
                raise CheckpointError(f"tensor {name!r} has no place in this model ({objection})")
        for layer in gdn_layers(config):
            prefix = gdn_prefix(layer)
            own = {n.removeprefix(prefix): r for n, r in self.tensors.items() if n.startswith(prefix)}
            self._check_layer(prefix, shapes, own)
        self._check_tier()

    def _check_texts(self) -> None:
        texts = self.header["texts"]
        if not isinstance(texts, dict) or not texts.keys() <= set(TEXT_FILES):
            raise CheckpointError(f"texts must have keys among {', '.join(TEXT_FILES)}, got {texts!r:.100}")
        for name, sha256 in texts.items():
            _check_sha256(f"texts: {name}", sha256)

    def _check_tier(self) -> None:
        """What the tier says is in 4 bits is, and nothing else where it says that nothing is."""
        parts = self.header["q4_parts"]
        if self.header["tier"] == "f32":
            if odd := next((name for name, record in self.tensors.items() if record.dtype == Q4_0), None):
                raise CheckpointError(f"tensor {odd!r} is {Q4_0} in a checkpoint of tier f32")
            if parts is not None:
                raise CheckpointError(f"q4_parts must be null in tier f32, got {parts!r:.40}")
            return
        if parts not in Q4_PARTS:
            raise CheckpointError(f"q4_parts must be one of {', '.join(Q4_PARTS)}, got {parts!r:.40}")
        for name, record in self.tensors.items():
            if record.dtype != Q4_0 and must_be_q4(name, record.shape, parts):
                raise CheckpointError(f"tensor {name!r} must be {Q4_0} in tier q4, got {record.dtype}")

    def _check_layer(self, prefix: str, shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, Record]) -> None:
        """One GDN layer has exactly its tensors, in their shapes."""
        for part in sorted(shapes.keys() ^ own.keys()):
            raise CheckpointError(f"tensor {prefix + part!r} {'is missing' if part in shapes else 'is unknown'}")
        for part, record in own.items():
            if record.shape != shapes[part]:
                raise CheckpointError(
                    f"tensor {prefix + part!r} must have shape {list(shapes[part])}, got {list(record.shape)}"
                )


def item_infos(tensors: Mapping[str, Record]) -> dict[str, dict[str, TensorInfo]]:
    """What each item holds."""
    items: dict[str, dict[str, TensorInfo]] = {}
    for name, record in tensors.items():
        items.setdefault(record.item, {})[name] = record.info
    return items


def _check_sha256(what: str, value: Any) -> None:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise CheckpointError(f"{what} must be 64 hexadecimal digits, got {value!r:.100}")


def _record(entry: Any, where: str) -> Record:
    try:
        return Record.from_json(entry)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
