"""Train a GNN to classify the nodes of a graph, on several ranks.

python examples/node_classification.py --dataset synthetic --model sage --devices 2
python examples/node_classification.py --dataset ogbn-arxiv --model gcn --devices 2 --epochs 20
"""

import argparse
import json
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from graphs import load_graph
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.transforms import GCNNorm
from torch_geometric.utils import degree, trim_to_layer
from torchmetrics.classification import MulticlassAccuracy

from lightning_mqgnn import GraphStore, MQGNNDataModule, PipelineMonitor


class NodeClassifier(L.LightningModule):
    """A stack of graph convolutions, trained on the seed nodes of each batch."""

    def __init__(
        self,
        model: str,
        in_channels: int,
        hidden: int,
        num_classes: int,
        layers: int,
        dropout: float,
        lr: float,
        weight_decay: float,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        widths = [in_channels, *[hidden] * (layers - 1), num_classes]
        self.convolutions = torch.nn.ModuleList()
        for i in range(layers):
            last = i == layers - 1
            if model == "gat":
                heads = 1 if last else 4
                conv = GATConv(widths[i], widths[i + 1] // heads, heads)
            elif model == "gcn":
                conv = GCNConv(widths[i], widths[i + 1], normalize=False)
            else:
                conv = SAGEConv(widths[i], widths[i + 1])
            self.convolutions.append(conv)
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, batch: Data) -> Tensor:
        """Return the logits of the batch's seed nodes, (batch_size, classes)."""
        x, edge_index = batch.x, batch.edge_index
        weight = gcn_weight(batch) if self.hparams["model"] == "gcn" else None
        for i, convolution in enumerate(self.convolutions):
            # Layer i has no use for the outermost i hops: leave them out.
            x, edge_index, weight = trim_to_layer(
                i, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index, weight
            )
            x = F.dropout(x, self.hparams["dropout"], self.training)
            x = convolution(x, edge_index) if weight is None else convolution(x, edge_index, weight)
            if i < len(self.convolutions) - 1:
                x = x.relu()
        logits: Tensor = x[: batch.batch_size]
        return logits

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch), batch.y[: batch.batch_size])
        self.log("train_loss", loss, prog_bar=True, batch_size=batch.batch_size)
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.val_accuracy(self(batch), batch.y[: batch.batch_size])
        self.log("val_accuracy", self.val_accuracy, prog_bar=True, batch_size=batch.batch_size)

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.test_accuracy(self(batch), batch.y[: batch.batch_size])
        self.log("test_accuracy", self.test_accuracy, batch_size=batch.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"], weight_decay=self.hparams["weight_decay"])


def normalize_for_gcn(data: Data | GraphStore) -> Data:
    """Add self-loops and the weights of GCN's symmetric normalisation, while the true in-degrees are at hand."""
    if isinstance(data, GraphStore):
        raise ValueError("a saved graph can't be normalised for --model gcn: normalise it before it is saved")
    data = GCNNorm()(data)
    data.in_degree = degree(data.edge_index[1], data.num_nodes)
    return data


def gcn_weight(batch: Data) -> Tensor:
    """The weights of the sampled edges, scaled up so that their sum stands for that of all the edges into a node."""
    scale = batch.in_degree / degree(batch.edge_index[1], batch.num_nodes)
    weight: Tensor = batch.edge_weight * scale[batch.edge_index[1]]
    return weight


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="synthetic", help="see examples/graphs.py")
    parser.add_argument("--model", choices=["sage", "gcn", "gat"], default="sage")
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="mqgnn", help="mqgnn, ddp, auto, ...")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256, help="seed nodes per batch and rank")
    parser.add_argument("--fan-out", type=int, nargs="+", default=[15, 10], help="neighbours per hop; -1 takes all")
    parser.add_argument("--eval-fan-out", type=int, nargs="+", help="the same for validation and test")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.3, help="before each layer")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append the results to this file, a line each run")
    return parser.parse_args()


def main() -> None:
    """Train, say where the time went, and test the best checkpoint."""
    arguments = parse_arguments()
    L.seed_everything(arguments.seed, verbose=False)
    data = load_graph(arguments.dataset)
    if arguments.model == "gcn":
        data = normalize_for_gcn(data)
    store = data if isinstance(data, GraphStore) else GraphStore.from_data(data)
    datamodule = MQGNNDataModule(
        store,
        num_neighbors=arguments.fan_out,
        batch_size=arguments.batch_size,
        eval_loader_kwargs={"num_neighbors": arguments.eval_fan_out} if arguments.eval_fan_out else None,
        seed=arguments.seed,
    )
    module = NodeClassifier(
        arguments.model,
        in_channels=store.node_attrs["x"].shape[1],
        hidden=arguments.hidden,
        num_classes=int(store.node_attrs["y"].max()) + 1,
        layers=len(arguments.fan_out),
        dropout=arguments.dropout,
        lr=arguments.lr,
        weight_decay=arguments.weight_decay,
    )
    monitor = PipelineMonitor()
    trainer = L.Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        callbacks=[monitor, ModelCheckpoint(monitor="val_accuracy", mode="max")],
        default_root_dir="runs",
        log_every_n_steps=10,
    )
    trainer.fit(module, datamodule=datamodule)
    (result,) = trainer.test(datamodule=datamodule, ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        print(f"\nTest accuracy: {result['test_accuracy']:.4f} (best epoch on the validation nodes)")
        if arguments.json:
            seconds = monitor.summary.seconds if monitor.summary else 0.0
            with arguments.json.open("a") as file:
                file.write(json.dumps({**vars(arguments), "json": None, **result, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
