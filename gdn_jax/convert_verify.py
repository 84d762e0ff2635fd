"""Proof that a converted checkpoint is what its source gives: every tensor, the configuration and the tokenizer."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints import Checkpoint, open_checkpoint
from checkpoints.gguf_config import metadata_of
from checkpoints.gguf_file import GgufFile
from checkpoints.gguf_layout import Part
from checkpoints.gguf_qwen import GgufCheckpoint
from checkpoints.names import listed
from checkpoints.orbax_item import Q4_0, arrays_of, content_hash, info_of
from checkpoints.q4_blocks import Q4Words
from checkpoints.store import StoreCheckpoint
from checkpoints.store_manifest import Q4_PARTS, is_large
from checkpoints.text_files import digest, read_texts
from gdn_jax.convert import PARTS_KEY, QUANTISER_KEY, TIER_KEY, Job, Recipe, Watcher, gguf_extras, gguf_parts
from gdn_jax.errors import CheckpointError
from gdn_jax.q4 import METHODS

__all__ = ["Verification", "verify"]

# F43: what adding 1 to a norm weight, and taking the log of an exponential, cost in float32.
_NORM_BOUND, _DECAY_BOUND = 2.0**-24, 2.0**-23


class Verification(NamedTuple):
    """The verdict on one destination.

    `exact` tensors have the same bits, `bounded` ones (norms and A_log of a GGUF file) lie within the rounding of the
    format; `worst` is the largest error among these as a share of its bound. `faults` says what is wrong.
    """

    tier: str
    q4_parts: str | None
    quantiser: str | None
    exact: int
    bounded: int
    worst: float
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the destination is what it must be."""
        return not self.faults


def verify(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    tier: str | None = None,
    quantiser: str | None = None,
    q4_parts: str | None = None,
    progress: Watcher | None = None,
) -> Verification:
    """Convert `source` again, tensor by tensor, and compare with what is at `destination`, which is not changed.

    Tier, quantiser and parts are those that the destination says it was made with; where it says nothing the first two
    must be given, and its tensors tell what is 4-bit. Dense tensors and codes are compared by SHA-256 of their bits,
    with dtype and shape.

    Raises:
        CheckpointError: the source cannot be read; the destination cannot be opened, is no result of a conversion, or
            does not agree with what is given. (A tensor that cannot be read there is a fault.)
    """
    source, destination = Path(source), Path(destination)
    with contextlib.ExitStack() as opened:
        result = opened.enter_context(open_checkpoint(destination, mtp=True))
        # A head may have been left out.
        original = opened.enter_context(open_checkpoint(source, mtp=bool(result.mtp_names())))
        recipe = _recipe(result, {"tier": tier, "quantiser": quantiser, "q4_parts": q4_parts})
        job = Job(source, original, recipe, progress)
        is_gguf = isinstance(result, GgufCheckpoint)
        faults = list(_gguf_config_faults(job, result) if is_gguf else _config_faults(job, result))
        names = result.names() + result.mtp_names()
        if odd := sorted(job.infos.keys() ^ set(names)):
            faults.append(f"only one of the two has {listed(odd)}")
        parts = gguf_parts(result) if is_gguf else {}
        shares: list[float] = []
        common = [name for name in names if name in job.infos]
        for name in common:
            share, fault = _compare(job, result, name, parts.get(name))
            faults += [fault] if fault else []
            shares += [share] if share is not None else []
            job.done([name])
    return Verification(
        tier=recipe.tier,
        q4_parts=job.q4_parts,
        quantiser=job.quantiser,
        exact=len(common) - len(shares),
        bounded=len(shares),
        worst=max(shares, default=0.0),
        faults=tuple(faults),
    )


def _recipe(result: Checkpoint, given: Mapping[str, str | None]) -> Recipe:
    """The recipe that the destination records, completed by what is given and in agreement with it."""
    recorded = _recorded(result)
    for name, value in given.items():
        if value is not None and recorded[name] is not None and value != recorded[name]:
            raise CheckpointError(f"{result.source}: was made with {name} {recorded[name]}, not {value}")
    known = {name: recorded[name] or value for name, value in given.items()}
    unknown_rule = recorded["tier"] is None and known["tier"] == "q4" and known["quantiser"] is None
    if known["tier"] is None or unknown_rule:
        raise CheckpointError(f"{result.source}: does not say how it was made; give the tier, and for q4 the quantiser")
    # Where a conversion quantised nothing it records no quantiser, and the choice does not matter.
    return Recipe(known["tier"], known["quantiser"] or METHODS[0], known["q4_parts"] or _parts_of(result))


def _recorded(result: Checkpoint) -> dict[str, Any]:
    if isinstance(result, StoreCheckpoint):
        return {"tier": result.tier, "quantiser": result.quantiser, "q4_parts": result.q4_parts}
    if isinstance(result, GgufCheckpoint):
        keys = {"tier": TIER_KEY, "quantiser": QUANTISER_KEY, "q4_parts": PARTS_KEY}
        with GgufFile(result.source) as file:
            return {name: file.metadata.get(key) for name, key in keys.items()}
    raise CheckpointError(f"{result.source}: expected a converted checkpoint or a GGUF file to verify")


def _parts_of(result: Checkpoint) -> str:
    """What is in 4 bits in a file that does not say so."""
    others = any(result.info(name).dtype == Q4_0 for name in result.names() if not is_large(name))
    return Q4_PARTS[0 if others else 1]


def _config_faults(job: Job, result: Checkpoint) -> Iterator[str]:
    original = job.source.config
    for key in sorted(original.keys() | result.config.keys()):
        if original.get(key) != result.config.get(key):
            yield f"the configurations differ in {key}"
    assert isinstance(result, StoreCheckpoint)
    texts = {name: digest(data) for name, data in read_texts(job.path).items()}
    for name in sorted(texts.keys() | result.texts.keys()):
        if texts.get(name) != result.texts.get(name):
            yield f"the text files differ in {name}"


def _gguf_config_faults(job: Job, result: Checkpoint) -> Iterator[str]:
    """The metadata must be those that the source's configuration and tokenizer give; the file has floats of 32 bits."""
    expected = metadata_of(job.source.config, mtp=bool(result.mtp_names())) | gguf_extras(job)
    with GgufFile(result.source) as file:
        for key, wanted in expected.items():
            found = file.metadata.get(key)
            wanted = float(np.float32(wanted)) if isinstance(wanted, float) else wanted
            if not _same_value(found, wanted):
                yield f"metadata key {key} is {found!r:.80}, expected {wanted!r:.80}"


def _same_value(found: Any, wanted: Any) -> bool:
    """Whether two metadata values are the same; numbers come in arrays, and lists of text as lists."""
    if isinstance(found, np.ndarray) or isinstance(wanted, np.ndarray):
        return found is not None and np.array_equal(found, wanted)
    return found == wanted


def _compare(job: Job, result: Checkpoint, name: str, part: Part | None) -> tuple[float | None, str | None]:
    """The error as a share of its bound where one applies, and what is wrong, if anything.

    The two sides are held one after the other, except where numbers must be compared, and these are small.
    """
    value = job.recipe.apply(job.source, name).value
    if part is not None and not part.is_matrix and isinstance(value, np.ndarray):
        value = value.astype(np.float32)
    info, digest = info_of(value), content_hash(arrays_of(value))
    rounded = value if part is not None and part.transform is not None else None
    del value
    try:
        found = result.read_words(name) if info.dtype == Q4_0 else result.read(name)
    except CheckpointError as error:
        return None, str(error)
    if info_of(found) != info:
        return None, f"tensor {name!r} is {_text(info_of(found))}, expected {_text(info)}"
    if isinstance(rounded, np.ndarray) and isinstance(found, np.ndarray):
        share = _share_of_bound(name, found, rounded)
        return share, None if share <= 1 else f"tensor {name!r} is off by {share:.3g} times what the format costs"
    same = content_hash(arrays_of(found)) == digest
    return None, None if same else f"tensor {name!r} has other {'codes' if isinstance(found, Q4Words) else 'numbers'}"


def _share_of_bound(name: str, found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error in units of its bound: 2^-24 max(1, |1 + w|) for norms, 2^-23 max(1, |A|) for A_log."""
    exact = expected.astype(np.float64)
    bound, size = (_DECAY_BOUND, exact) if name.endswith(".A_log") else (_NORM_BOUND, 1 + exact)
    shares = np.abs(found.astype(np.float64) - exact) / (bound * np.maximum(1, np.abs(size)))
    return float(np.nan_to_num(shares, nan=np.inf).max())


def _text(info: Any) -> str:
    return f"{info.dtype} {list(info.shape)}"
