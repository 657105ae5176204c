"""The guard against DNS rebinding: addresses and own names are allowed, with and without a port, and nothing else."""

import pytest

from tinyforge.hosts import is_allowed


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("127.0.0.1:8000", True),
        ("0.0.0.0", True),
        ("10.1.2.3", True),
        ("[::1]", True),
        ("[fe80::1]:8000", True),
        ("my.name", True),
        ("MY.Name:1", True),
        ("", False),
        (":80", False),
        ("evil.example", False),
        ("evil.example:80", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil", False),
        ("1.2.3", False),
        ("my.name:80.evil", False),
        ("my.name.", False),
        ("*", False),
    ],
)
def test_names_that_were_not_given_are_refused(header: str, allowed: bool) -> None:
    assert is_allowed(header, ["my.Name"]) is allowed
    assert is_allowed(header, ["*"])
