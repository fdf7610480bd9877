"""`RaCoMExchange` in a plain PyTorch loop, without Lightning.

torchrun --nproc-per-node 2 examples/plain_loop.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv

from lightning_mqgnn import MQGNNDataModule, RaCoM, RaCoMExchange, synthetic_graph

EPOCHS = 3


class SAGE(torch.nn.Module):
    """Two GraphSAGE layers."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(in_channels, 64), SAGEConv(64, num_classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Return the logits of all nodes: float32, (nodes, num_classes)."""
        logits: torch.Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return logits


def main() -> None:
    """Train on all ranks, and test on rank 0 after each epoch."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks begin with the same parameters
    data = synthetic_graph(num_nodes=20_000, num_edges=200_000)
    datamodule = MQGNNDataModule(data, num_neighbors=[10, 10], batch_size=128)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    model = SAGE(data.num_features, int(data.y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    warmup = RaCoM().warmup_steps(len(loader), EPOCHS * len(loader))
    exchange = RaCoMExchange([optimizer], RaCoM(warmup=warmup), dist.new_group())
    for epoch in range(EPOCHS):
        for batch in loader:
            logits = model(batch.x, batch.edge_index)[: batch.batch_size]
            optimizer.zero_grad()
            F.cross_entropy(logits, batch.y[: batch.batch_size]).backward()
            exchange.average_gradients([optimizer])
            exchange.before_step()
            optimizer.step()
            exchange.after_step()
        exchange.drain()  # now all ranks have the same model
        if dist.get_rank() == 0:
            with torch.no_grad():
                right = model(data.x, data.edge_index).argmax(1) == data.y
            accuracy, windows = float(right[data.test_mask].float().mean()), exchange.statistics.windows
            print(f"epoch {epoch}: test accuracy {accuracy:.3f} after {windows} windows")
    exchange.close()
    datamodule.teardown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
