"""What a run's measurements mean: the bottleneck, and the one setting to change. Pure functions of a `Summary`."""

from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table

_MATTERS = 0.1  # share of the time that a wait must take to be the bottleneck
_BUSY = 0.5  # share of its threads' time in which the stage that the others wait for works at least
_ON_CPU = 0.5  # a stage whose work is less on a processor mostly waits for something
_NO_PROCESSOR_LEFT = 0.85
_MOSTLY_LATE = 0.5  # of the waiting for other ranks: the exchange itself takes the rest
_ALWAYS_LAST = 0.8  # of the exchanges: it is not chance which rank is the slowest

_STEP_ALONE = "let ranks step by themselves: MQGNNStrategy() without period=1, max_staleness=0"


@dataclass(frozen=True)
class StageSummary:
    """A stage, over a time. Shares are of its threads' time.

    Attributes:
        name: Of the stage.
        threads: That work in it; 0 if it is done by the thread that needs its result.
        busy: Share that went into its work.
        starved: Share in which it waited for the stage before.
        blocked: Share in which it waited for room in its queue.
        on_cpu: Share of its work in which it ran on a processor.
        items: Finished.
        nbytes: Of the items.
        p50: Median seconds per item.
        p99: 99th percentile of the seconds per item.
        depth: Items in its queue at the end.
        capacity: Items that its queue holds; 0 if it has none.
    """

    name: str
    threads: int
    busy: float
    starved: float
    blocked: float
    on_cpu: float
    items: int
    nbytes: int = 0
    p50: float = 0.0
    p99: float = 0.0
    depth: int = 0
    capacity: int = 0


@dataclass(frozen=True)
class ExchangeSummary:
    """What ranks exchanged.

    Attributes:
        synchronous: Whether each step is in lock-step.
        period: Optimizer steps in a window.
        max_staleness: The bound on it.
        staleness: How often a window was applied so many steps after it closed.
        delta: Distance of the replicas, see `RaCoM.divergence_bound`.
        nbytes: Given to collectives.
        lossy: Whether progress is rounded to 16 bits.
        late: Seconds of the waiting for other ranks until the last of them had joined; what is left took the network.
        last: How often which rank was the last.
    """

    synchronous: bool
    period: int
    max_staleness: int
    staleness: dict[int, int]
    delta: float
    nbytes: int
    lossy: bool
    late: float = 0.0
    last: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Where the training thread's time went, and what happened behind it.

    Attributes:
        seconds: Of training, validation left out.
        wait: Of these, spent waiting for batches.
        exchange_wait: Spent waiting for other ranks.
        batches: Trained on.
        seeds: In these batches.
        edges: In these batches.
        stages: Of the loader, in order.
        exchange: Between ranks; None on one rank, or with another strategy.
        hit_rates: Of the caches, by name.
        features_on_disk: Whether feature rows are read from a file.
        has_feature_cache: Whether some of them are held in memory.
        has_transform: Whether the prepare stage calls a function of the user's.
        edge_format: Of the batches.
        memory_bound: Whether queues had to shrink for want of memory, and are still that short.
        processors: Share of the processors' time that this process took.
        spare_threads: Threads that could be added before each has a processor.
        memory: Bytes used and the limit, by place.
        utilisation: Of the device, if it says so.
    """

    seconds: float
    wait: float
    exchange_wait: float
    batches: int
    seeds: int
    edges: int
    stages: tuple[StageSummary, ...] = ()
    exchange: ExchangeSummary | None = None
    hit_rates: dict[str, float] = field(default_factory=dict)
    features_on_disk: bool = False
    has_feature_cache: bool = False
    has_transform: bool = False
    edge_format: str = "coo"
    memory_bound: bool = False
    processors: float = 0.0
    spare_threads: int = 0
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    utilisation: float | None = None

    @property
    def compute(self) -> float:
        """Seconds of the training thread that are left: the model, the optimizer, Lightning."""
        return max(self.seconds - self.wait - self.exchange_wait, 0.0)


@dataclass(frozen=True)
class Diagnosis:
    """The bottleneck, what shows it, and what to change."""

    bottleneck: str  # "compute", "network", "straggler", "memory", "disk", "burst" or the name of a stage
    evidence: str
    advice: str


def diagnose(summary: Summary) -> Diagnosis:
    """Say what training waits for most."""
    seconds = max(summary.seconds, 1e-9)
    waits, exchanges = summary.wait / seconds, summary.exchange_wait / seconds
    if exchanges >= _MATTERS and exchanges >= waits:
        return _other_ranks(summary, exchanges)
    if waits >= _MATTERS:
        return _loader(summary, waits)
    return _compute(summary)


def _other_ranks(summary: Summary, share: float) -> Diagnosis:
    evidence = f"training waits for other ranks {share:.0%} of the time"
    exchange = summary.exchange
    late = 0.0 if exchange is None else exchange.late / summary.exchange_wait
    if exchange is not None and exchange.last and late >= _MOSTLY_LATE:
        evidence += f", {late:.0%} of it until the last of them comes"
        return _straggler(exchange, evidence)
    if exchange is None or exchange.synchronous:
        advice = _STEP_ALONE
    elif not exchange.lossy:
        advice = "send half as many bytes: MQGNNStrategy(exchange_dtype=torch.bfloat16)"
    else:
        advice = f"exchange less often: MQGNNStrategy(max_staleness={2 * exchange.max_staleness}, max_period=128)"
    return Diagnosis("network", evidence, advice)


def _straggler(exchange: ExchangeSummary, evidence: str) -> Diagnosis:
    rank, times = max(exchange.last.items(), key=lambda item: item[1])
    often = times / sum(exchange.last.values())
    if exchange.synchronous:
        advice = _STEP_ALONE
    elif often >= _ALWAYS_LAST:
        evidence += f": rank {rank} in {often:.0%} of the exchanges"
        advice = f"give rank {rank} the processors, the disk and the device that the others have"
    elif max(exchange.staleness, default=0) >= exchange.max_staleness:
        advice = f"let ranks be further apart: MQGNNStrategy(max_staleness={2 * exchange.max_staleness})"
    else:
        advice = "let ranks meet less often: Trainer(check_val_every_n_epoch=2)"
    return Diagnosis("straggler", evidence, advice)


def _loader(summary: Summary, share: float) -> Diagnosis:
    evidence = f"training waits for batches {share:.0%} of the time"
    if summary.memory_bound:
        used, limit = summary.memory.get("host", (0, 0))
        return Diagnosis(
            "memory",
            f"{evidence}, and queues had to shrink: {_size(used)} of {_size(limit)} are used",
            "raise AdaptiveQueueCallback(memory_limit=...) if there is more, else lower batch_size",
        )
    threaded = [stage for stage in summary.stages if stage.items]
    slowest = max(threaded, key=lambda stage: stage.busy, default=None)
    if slowest is None:
        return Diagnosis(
            "loader", evidence, "use MQGNNDataModule, or give your DataLoader more workers: num_workers=..."
        )
    evidence += f"; stage {slowest.name!r} is busy {slowest.busy:.0%} of it with {slowest.threads} thread(s)"
    if slowest.busy < _BUSY:
        return Diagnosis("burst", f"{evidence}: batches come in bursts", 'let queues grow: queue_size="auto"')
    starts_on_cpu = slowest.on_cpu >= _ON_CPU or summary.processors > _NO_PROCESSOR_LEFT
    reads_rows = slowest.name == "fetch" or (slowest.name == "prepare" and not summary.has_feature_cache)
    if not starts_on_cpu and reads_rows and summary.features_on_disk:
        more = "a larger feature_cache" if summary.has_feature_cache else 'feature_cache="1GiB" or more'
        return Diagnosis("disk", f"{evidence}, {1 - slowest.on_cpu:.0%} of that waiting for the disk", f"set {more}")
    return Diagnosis(slowest.name, evidence, _advice_for(slowest, summary))


def _advice_for(stage: StageSummary, summary: Summary) -> str:
    waits = stage.on_cpu < _ON_CPU and summary.processors < _NO_PROCESSOR_LEFT
    can_add = summary.spare_threads > 0 or waits
    more = max(stage.threads, 0) + 1
    if stage.name == "sample":
        return f"sampling_threads={more}" if can_add else "resample_every=2, or smaller num_neighbors"
    if stage.name == "prepare":
        if summary.has_transform and not can_add:
            return "make transform cheaper: it runs for each batch"
        return f"prepare_threads={more}" if can_add else "keep features in half precision: data.x = data.x.half()"
    if stage.name == "transfer":
        return 'keep rows on the device: feature_cache="1GiB" or more'
    return "a larger feature_cache"


def _compute(summary: Summary) -> Diagnosis:
    share = summary.compute / max(summary.seconds, 1e-9)
    evidence = f"the loader keeps up: the model itself takes {share:.0%} of the time"
    if summary.edge_format == "coo":
        advice = 'let PyG\'s layers multiply by sparse matrices: edge_format="csc"'
    else:
        advice = 'a smaller model or precision, Trainer(precision="bf16-mixed")'
    return Diagnosis("compute", evidence, advice)


def as_table(summary: Summary, diagnosis: Diagnosis) -> Table:
    """The end-of-fit table."""
    seconds = max(summary.seconds, 1e-9)
    shares = [f"model {summary.compute / seconds:.0%}", f"waiting for batches {summary.wait / seconds:.0%}"]
    if summary.exchange is not None:
        shares.append(f"waiting for other ranks {summary.exchange_wait / seconds:.0%}")
    table = Table(
        title=f"{summary.batches} batches in {summary.seconds:.1f} s, {summary.seeds / seconds:,.0f} seeds/s, "
        f"{summary.edges / seconds:,.0f} edges/s: {', '.join(shares)}",
        caption=f"Bottleneck: {diagnosis.bottleneck}. {_sentence(diagnosis.evidence)}.\n"
        f"One thing to change: {diagnosis.advice}",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # else a terminal of 80 columns would cut the titles
    )
    table.add_column("stage")
    for name in ("threads", "busy", "starved", "blocked", "ms p50", "ms p99", "MB/s", "queue"):
        table.add_column(name, justify="right")
    for stage in summary.stages:
        table.add_row(
            stage.name,
            str(stage.threads or "-"),
            f"{stage.busy:.0%}",
            f"{stage.starved:.0%}",
            f"{stage.blocked:.0%}",
            f"{1e3 * stage.p50:.1f}",
            f"{1e3 * stage.p99:.1f}",
            f"{stage.nbytes / seconds / 1e6:.0f}",
            f"{stage.depth}/{stage.capacity}" if stage.capacity else "-",
        )
    rows = [f"{name}: {rate:.0%} found" for name, rate in summary.hit_rates.items()]
    if summary.exchange is not None and summary.exchange.staleness:
        exchange = summary.exchange
        rows.append(
            f"windows of {exchange.period} steps, {max(exchange.staleness)} late at most, "
            f"distance {exchange.delta:.2g}, {_size(exchange.nbytes)} sent"
        )
    rows += [f"{place} memory: {_size(used)} of {_size(limit)}" for place, (used, limit) in summary.memory.items()]
    if summary.utilisation is not None:
        rows.append(f"device busy {summary.utilisation:.0%}")
    if rows:
        table.caption = f"{'; '.join(rows)}\n{table.caption}"
    return table


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
