"""EpochPlan: which seed nodes are in which batch on which rank in which epoch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np


def random_key(seed: int, *of: object) -> int:
    """A random key (64 bits) that depends on the seed and on what it is for alone."""
    text = repr((int(seed), *of)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class EpochPlan:
    """A pure function from (epoch, rank, batch) to positions in the list of seed nodes, and to random keys.

    Every seed is in exactly one batch of one rank per epoch: nothing is padded, and nothing is dropped unless
    `drop_last` is set. All ranks have the same number of batches. To make both true, the order of the epoch is cut
    into shards whose sizes differ by at most one seed, and each shard into batches of `batch_size` seeds and a shorter
    last one. Where the smaller shards would be a batch short (17 seeds on 2 ranks with `batch_size=8`), their last
    batch gets a seed of the one before; with `batch_size=1`, the larger shards end in a batch of 2.

    Args:
        num_seeds: Number of seed nodes over all ranks.
        batch_size: Seed nodes per batch and rank.
        world_size: Number of ranks.
        seed: Seed of all random decisions.
        stream: Keeps the random keys of, say, training and validation apart.
        shuffle: A new order each epoch; otherwise the given one.
        drop_last: Only batches of exactly `batch_size` seeds; what is left over is not visited in this epoch.
        resample_every: Epochs that share their batches: all but the first of them have the batches of that one, on the
            same rank, in an order of their own.

    Raises:
        TypeError: `batch_size`, `world_size` or `resample_every` is not an integer.
        ValueError: A number is out of range, or there are fewer seeds than ranks (or than a batch for each rank, with
            `drop_last`).
    """

    num_seeds: int
    batch_size: int
    world_size: int = 1
    seed: int = 0
    stream: str = "train"
    shuffle: bool = True
    drop_last: bool = False
    resample_every: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "world_size", "resample_every"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer):
                raise TypeError(f"{name}={value}: give an integer")
            if value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")
        if self.num_seeds < self.world_size:
            raise ValueError(
                f"{self.num_seeds} seed nodes ({self.stream}) can't be shared by {self.world_size} ranks: "
                "every rank needs at least one. Use fewer devices or more seed nodes"
            )
        if self.num_batches == 0:
            raise ValueError(
                f"drop_last=True with batch_size={self.batch_size} leaves no batch of the "
                f"{self.num_seeds // self.world_size} seed nodes ({self.stream}) of a rank. Use a smaller batch_size"
            )

    @property
    def num_batches(self) -> int:
        """Batches per epoch on each rank."""
        smallest, larger_shards = divmod(self.num_seeds, self.world_size)
        if self.drop_last:
            return smallest // self.batch_size
        largest = smallest + (larger_shards > 0)
        return min(-(-largest // self.batch_size), smallest)

    def shard(self, epoch: int, rank: int) -> np.ndarray:
        """The positions that `rank` visits in `epoch`, in the order in which they are cut into batches: int64.

        Epochs that have the batches of an earlier one are none that is cut, see `sampled_in`.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank}: ranks go from 0 to {self.world_size - 1}")
        smallest, larger_shards = divmod(self.num_seeds, self.world_size)
        begin = rank * smallest + min(rank, larger_shards)
        end = begin + smallest + (rank < larger_shards)
        if not self.shuffle:
            return np.arange(begin, end)
        generator = np.random.Generator(np.random.Philox(key=self._digest("order", int(epoch))))
        return generator.permutation(self.num_seeds)[begin:end]

    def batches(self, epoch: int, rank: int) -> list[np.ndarray]:
        """The batches of `rank` in `epoch`, each as positions in the list of seed nodes (int64)."""
        sampled = self._batches_as_sampled(self.sampled_in(epoch), rank)
        return [sampled[i] for i in self.order(epoch, rank)]

    def sampled_in(self, epoch: int) -> int:
        """The epoch whose batches `epoch` has."""
        return epoch - epoch % self.resample_every

    def order(self, epoch: int, rank: int) -> np.ndarray:
        """Which batches of the epoch `sampled_in(epoch)` the batches of `epoch` are: int64, (num_batches,)."""
        if epoch == self.sampled_in(epoch) or not self.shuffle:
            return np.arange(self.num_batches)
        generator = np.random.Generator(np.random.Philox(key=self._digest("batches", int(epoch), int(rank))))
        return generator.permutation(self.num_batches)

    def _batches_as_sampled(self, epoch: int, rank: int) -> list[np.ndarray]:
        shard = self.shard(epoch, rank)
        count = self.num_batches
        cuts = [min(i * self.batch_size, len(shard) - (count - i)) for i in range(count)]
        cuts.append(count * self.batch_size if self.drop_last else len(shard))
        return [shard[begin:end] for begin, end in pairwise(cuts)]

    def rest(self, epoch: int, rank: int, before: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The batches of `rank` in what other numbers of ranks have left of `epoch`, for a run that resumes there.

        Args:
            epoch: Number of the epoch.
            rank: This process.
            before: For each part of the epoch so far, the number of ranks and how many batches each of them took.

        Returns:
            As many batches on each rank. None if fewer seeds are left than ranks (or with `drop_last`, than a batch for
            each of them): those few are not visited in this epoch.
        """
        left = None
        for world_size, taken in before:
            whole = replace(self, world_size=world_size)
            parts = [
                (whole.batches(epoch, other) if left is None else self._cut(left, world_size, other))[taken:]
                for other in range(world_size)
            ]
            left = np.concatenate([np.zeros(0, np.int64), *(batch for part in parts for batch in part)])
        return self.batches(epoch, rank) if left is None else self._cut(left, self.world_size, rank)

    def _cut(self, order: np.ndarray, world_size: int, rank: int) -> list[np.ndarray]:
        full = self.batch_size if self.drop_last else 1
        if len(order) // world_size < full:
            return []
        plan = replace(self, num_seeds=len(order), world_size=world_size, shuffle=False, resample_every=1)
        return [order[positions] for positions in plan.batches(0, rank)]

    def key(self, epoch: int, global_batch: int) -> int:
        """The random key (64 bits) of the batch sampled as `global_batch` = batch * world_size + rank of `epoch`."""
        return self._digest("batch", int(epoch), int(global_batch))

    def _digest(self, *of: object) -> int:
        return random_key(self.seed, self.stream, *of)
