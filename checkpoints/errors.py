"""The root of the error tree; it lives here because this package is a leaf and `gdn_jax.errors` builds on it."""


class GdnError(Exception):
    """Base of every error that this project raises on purpose."""


class CheckpointError(GdnError, ValueError):
    """A file is missing, damaged, of an unknown format, or does not hold what its configuration promises."""
