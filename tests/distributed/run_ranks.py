"""What product code runs ranks with, for tests."""

from rltrain.policy.ranks import rendezvous, run_ranks

__all__ = ["rendezvous", "run_ranks"]
