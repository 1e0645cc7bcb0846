"""Train several runs as jobs of a cluster, through submitit."""

from comrope.experiments.cluster.options import Cluster, find_cluster
from comrope.experiments.cluster.wait import run_on_cluster

__all__ = ["Cluster", "find_cluster", "run_on_cluster"]
