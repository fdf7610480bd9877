"""HopSampler: blocks in which what is drawn below a node does not depend on the other seeds."""

from collections.abc import Sequence

import numpy as np

from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.plan import random_key
from lightning_mqgnn.sampling import NeighborSampler, SampledSubgraph
from lightning_mqgnn.sampling.neighbor import check_num_neighbors


class HopSampler:
    """Samples blocks in which each hop is on its own: what is below a node depends on the hop and the node alone.

    `NeighborSampler` draws for a node once, with the fan-out of the hop that first reached it. In a batch that may be
    a hop of another seed's, nearer by; so the seeds of one request would change what is drawn for those of another.
    """

    def __init__(self, store: GraphStore, num_neighbors: Sequence[int], seed: int) -> None:
        fanouts = check_num_neighbors(num_neighbors)
        samplers = {fanout: NeighborSampler(store, [fanout]) for fanout in fanouts}
        for sampler in samplers.values():
            sampler.warm_up()
        self._hops = [(samplers[fanout], random_key(seed, "serving", hop)) for hop, fanout in enumerate(fanouts)]

    def __call__(self, seeds: np.ndarray) -> SampledSubgraph:
        """Sample the block of distinct `seeds`."""
        frontier, num_nodes, num_edges = seeds, len(seeds), 0
        nodes, colptrs, rows, hops = [], [np.zeros(1, np.int32)], [], []
        for sampler, key in self._hops:
            hop = sampler.sample(frontier, key)
            nodes.append(hop.node[: len(frontier)])
            # The hop's sources become nodes of their own, behind all others, be they in its frontier or not.
            reached = np.zeros(len(hop.node), bool)
            reached[hop.row] = True
            local = np.cumsum(reached, dtype=np.int32) + np.int32(num_nodes - 1)
            rows.append(local[hop.row])
            colptrs.append(hop.colptr[1:] + np.int32(num_edges))
            hops.append(hop)
            frontier = hop.node[reached]
            num_nodes += len(frontier)
            num_edges += len(hop.row)
        nodes.append(frontier)
        return SampledSubgraph(
            node=np.concatenate(nodes),
            colptr=np.concatenate(colptrs),
            row=np.concatenate(rows),
            position=np.concatenate([hop.position for hop in hops]),
            num_sampled_nodes=[len(part) for part in nodes],
            num_sampled_edges=[len(hop.row) for hop in hops],
            input_id=seeds,
            version=hops[0].version,  # if the graph was changed since, the prepare stage will notice
        )
