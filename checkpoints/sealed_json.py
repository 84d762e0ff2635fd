"""JSON files that say what they are and whether they are whole: format, version, and a hash of everything else.

The hash is SHA-256 of the object without it, as JSON with sorted keys and without spaces.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.strict_json import json_object

__all__ = ["decode_sealed", "encode_sealed"]

_SEAL = "sha256"


def encode_sealed(body: Mapping[str, Any]) -> bytes:
    """The bytes of a file with `body`, of which `format` and `version` must be a part."""
    return json.dumps({**body, _SEAL: _hash(body)}, indent=1, sort_keys=True).encode() + b"\n"


def decode_sealed(data: bytes, source: str, *, kind: str, format: str, version: int, remedy: str) -> dict[str, Any]:
    """The body in `data`: the inverse of `encode_sealed`.

    `source` names the file in errors, `kind` what it should be the manifest of, and `remedy` says what to do about
    another version.

    Raises:
        CheckpointError: no JSON object; another format or version; damage.
    """
    body = json_object(data, source)
    if body.get("format") != format:
        raise CheckpointError(f"{source}: not the manifest of a {kind} (no format {format!r})")
    if type(body.get("version")) is not int or body["version"] != version:
        raise CheckpointError(
            f"{source}: written in version {body.get('version')!r:.40} of the format, and this program reads version "
            f"{version}; use the program that wrote it, or {remedy}"
        )
    if body.pop(_SEAL, None) != _hash(body):
        raise CheckpointError(f"{source}: its content does not match its sha256: damaged or edited")
    return body


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
