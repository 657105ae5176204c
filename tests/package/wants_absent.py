"""A command's module whose extra is not installed."""

import absent_package  # type: ignore[import-not-found]  # noqa: F401
