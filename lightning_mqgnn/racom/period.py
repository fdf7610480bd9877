"""PeriodController: decides how many steps a window has, from numbers that all ranks share."""

from bisect import bisect_left

from lightning_mqgnn.racom.settings import RaCoM

PERIODS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The lengths that a rank may ask for."""

_MARGIN = 1.25  # a window this much longer than its exchange leaves room for noise
_OWN_SHARE = 0.01  # of the training thread's time may go into windows; the calls themselves come on top
_CALM = 8  # windows of agreement before the ceiling is lifted
_PATIENCE = 4  # windows in a row that would do with half the period before it is shortened


def needed_slot(exchange_seconds: float, own_seconds: float, step_seconds: float) -> int:
    """Index in `PERIODS` of the shortest period that is long enough for a window.

    Its computation covers the exchange, with some room, and what the training thread itself does for a window
    (`own_seconds`) is a small share of it.
    """
    steps = max(_MARGIN * exchange_seconds, own_seconds / _OWN_SHARE) / max(step_seconds, 1e-9)
    return min(bisect_left(PERIODS, steps), len(PERIODS) - 1)


class PeriodController:
    """A state machine without clocks: the same updates give the same periods, on every rank.

    The period is the smallest that hides the exchange (`needed_slot`), but not below `settings.period` for the sake of
    speed alone, and it is halved whenever replicas are further apart than `settings.divergence_bound`. When both can't
    be had, agreement wins.

    Attributes:
        period: Optimizer steps.
    """

    def __init__(self, settings: RaCoM) -> None:
        self._settings = settings
        self.period = settings.period
        self._ceiling = max(settings.max_period, settings.period)
        self._calm = 0
        self._short = 0

    def update(self, period: int, needed: int, delta: float) -> None:
        """Take in a window that all ranks completed.

        Args:
            period: How many steps it had.
            needed: The shortest period that hides an exchange, see `needed_slot`; in steps.
            delta: The replicas' distance from their mean, see `RaCoM.divergence_bound`.
        """
        settings = self._settings
        if not settings.adaptive:
            return
        if delta > settings.divergence_bound:
            self._calm = 0
            self._ceiling = min(self._ceiling, max(1, period // 2))
        else:
            self._calm = self._calm + 1 if delta < settings.divergence_bound / 2 else 0
            if self._calm >= _CALM:
                self._calm = 0
                self._ceiling = min(2 * self._ceiling, max(settings.max_period, settings.period))
        wanted = max(settings.period, needed)
        self._short = self._short + 1 if 2 * wanted <= self.period else 0
        if wanted > self.period or self._short >= _PATIENCE:
            self.period, self._short = wanted, 0
        self.period = min(max(self.period, settings.period), self._ceiling)

    def state_dict(self) -> dict[str, int]:
        """Return the state as plain numbers."""
        return {"period": self.period, "ceiling": self._ceiling, "calm": self._calm, "short": self._short}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`."""
        self.period, self._ceiling = state["period"], state["ceiling"]
        self._calm, self._short = state["calm"], state["short"]
