"""The guard of the servers against DNS rebinding.

A page of another site can have its own name resolve to this machine, and then reads the answers of a server here as if
they were its own site's. The browser still sends that name in the Host header, so names are refused unless they were
given. An address cannot be rebound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

from tinyforge.errors import Parser

REFUSED = "the Host header names another server; --allow-host NAME allows a name"


def add_allow_host_flag(parser: Parser) -> None:
    parser.flag("--allow-host", [], "a further host name of this server; * for any", action="append", metavar="NAME")


def is_allowed(header: str, names: Iterable[str]) -> bool:
    """Whether a Host header, with or without a port, is an IP address, localhost or one of `names`. A name * allows
    any."""
    host = re.sub(r":\d*$", "", header.lower())
    allowed = {"localhost", *map(str.lower, names)}
    if host in allowed or "*" in allowed:
        return True
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
