"""ServiceTime: what a batch is expected to take, learnt from those before it."""

from dataclasses import dataclass

_FADING = 0.95  # of the weight of a batch's time, with each batch after it
_TELLING = 0.01  # sizes that differ by less than a tenth tell nothing
_FIRST_BATCH = 32  # seeds, before anything is known


@dataclass(frozen=True)
class ServiceTime:
    """The time that a batch takes, as a fixed part and a part per seed, learnt from the batches so far.

    A line is fitted to (seeds, seconds) by least squares. Weights fade by a twentieth per batch, so the line is that of
    the last few dozen. It is a value: `after` returns the next one.

    Attributes:
        weight: Sum of the weights of all batches.
        seeds: Weighted sum of their seeds.
        seconds: Weighted sum of their times.
        squares: Weighted sum of seeds * seeds.
        products: Weighted sum of seeds * seconds.
    """

    weight: float = 0.0
    seeds: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def after(self, seeds: int, seconds: float) -> "ServiceTime":
        """What is known after one more batch."""
        return ServiceTime(
            weight=_FADING * self.weight + 1,
            seeds=_FADING * self.seeds + seeds,
            seconds=_FADING * self.seconds + seconds,
            squares=_FADING * self.squares + seeds * seeds,
            products=_FADING * self.products + seeds * seconds,
        )

    @property
    def spread(self) -> float:
        """Variance of the batches' seeds, relative to the square of their mean."""
        return max(self.squares * self.weight / self.seeds**2 - 1, 0.0) if self.seeds else 0.0

    def line(self) -> tuple[float, float]:
        """Seconds per batch, and per seed in it. Where batches are too much alike to tell, all is put on the seeds."""
        if not self.seeds:
            return 0.0, 0.0
        seeds, seconds = self.seeds / self.weight, self.seconds / self.weight
        per_seed = seconds / seeds
        if self.spread > _TELLING:
            slope = (self.products / self.weight - seeds * seconds) / (self.spread * seeds**2)
            per_seed = min(max(slope, per_seed / 100), per_seed)  # noise must not make either part negative
        return seconds - per_seed * seeds, per_seed

    def half_fixed(self) -> float:
        """The number of seeds at which half of the time is the fixed part; 0 while there is none that is known."""
        fixed, per_seed = self.line()
        return fixed / per_seed if per_seed > 0 else 0.0

    def largest_batch(self, target: float, most: int) -> int:
        """The largest number of seeds, from 1 to `most`, that is expected to take no more than `target` seconds.

        If a single seed takes longer already, it is `half_fixed`: smaller batches would lower the throughput, and by
        that let requests wait longer still.

        While batches are too much alike to tell a fixed part, twice their size may be tried: it will tell.
        """
        if not self.seeds:
            return min(_FIRST_BATCH, most)
        fixed, per_seed = self.line()
        if per_seed <= 0:
            return most
        seeds = (target - fixed) / per_seed if fixed + per_seed <= target else self.half_fixed()
        if self.spread <= _TELLING:
            seeds = max(seeds, 2 * self.seeds / self.weight)
        return max(int(min(seeds * (1 + 1e-9), most)), 1)  # what is whole but for rounding stays whole
