"""Ranks that compute together: `Group`, this process alone, workers that share memory, MPI and NCCL ranks."""

from tinyforge.parallel.group import Alone, Group, part_of, start_group

__all__ = ["Alone", "Group", "part_of", "start_group"]
