"""Groups of processes that compute together: `Group`, this process alone, and workers that share memory."""

from tinyforge.parallel.group import Alone, Group, part_of, send_object, start_group

__all__ = ["Alone", "Group", "part_of", "send_object", "start_group"]
