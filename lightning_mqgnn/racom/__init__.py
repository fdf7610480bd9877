"""How ranks share what they learn; over `torch.distributed` alone, of use in any training loop.

`gradients` exchanges in lock-step, `windows` asynchronously; `exchange` is what a loop calls, `settings` what it can
choose, `period` what decides the length of windows, `arrivals` what tells a slow network from a slow rank. `replicas`
makes everything else alike.
"""

from lightning_mqgnn.racom.exchange import RaCoMExchange
from lightning_mqgnn.racom.gradients import GradientExchange
from lightning_mqgnn.racom.replicas import average_buffers, average_optimizer_state, broadcast_state
from lightning_mqgnn.racom.settings import RaCoM
from lightning_mqgnn.racom.windows import ExchangeStatistics

__all__ = [
    "ExchangeStatistics",
    "GradientExchange",
    "RaCoM",
    "RaCoMExchange",
    "average_buffers",
    "average_optimizer_state",
    "broadcast_state",
]
