"""Timelines: what each thread did when, as a trace that Perfetto opens and as a picture."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_mqgnn.monitor.recording import Work

TRAINING = "training"  # the stage and the track of the training thread
_COLOURS = {"sample": "#4c72b0", "fetch": "#55a868", "prepare": "#dd8452", "transfer": "#8172b3", TRAINING: "#c44e52"}
_OTHER_COLOUR = "#937860"


class Level(NamedTuple):
    """Items in the queue behind a stage, and how many it holds, at a time."""

    time: float
    stage: str
    depth: int
    capacity: int


class Resize(NamedTuple):
    """A change of a queue or of a number of threads, at a time."""

    time: float
    text: str


@dataclass(frozen=True)
class Timeline:
    """What happened, in times of `time.perf_counter`.

    Attributes:
        work: Items on their way through stages; training is the last one.
        levels: How full queues were.
        resizes: What was resized.
        rank: Of the process.
    """

    work: Sequence[Work]
    levels: Sequence[Level]
    resizes: Sequence[Resize]
    rank: int = 0

    def tracks(self) -> list[str]:
        """The threads, in the order of the stages; training last."""
        first_seen: dict[str, float] = {}
        for work in self.work:
            first_seen[work.thread] = min(first_seen.get(work.thread, work.began), work.began)
        return sorted(first_seen, key=lambda thread: (thread == TRAINING, first_seen[thread]))

    def last_batches(self, number: int) -> "Timeline":
        """Only what belongs to the last so many batches that were trained on."""
        trained = [work for work in self.work if work.stage == TRAINING][-number:]
        if not trained:
            return self
        items = {work.item for work in trained}
        begin = trained[0].began
        return Timeline(
            [work for work in self.work if work.item in items or work.ended >= begin],
            [level for level in self.levels if level.time >= begin],
            [resize for resize in self.resizes if resize.time >= begin],
            self.rank,
        )


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write a trace in Chrome's JSON format (Trace Event Format), for https://ui.perfetto.dev or chrome://tracing.

    Threads are tracks, an arrow leads each batch from stage to stage, queues are counters and resizes instants.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}))


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    start = min([work.began for work in timeline.work] + [level.time for level in timeline.levels], default=0.0)
    here = {"pid": timeline.rank}

    def microseconds(time: float) -> float:
        return round(1e6 * (time - start), 3)

    yield {"ph": "M", "name": "process_name", **here, "args": {"name": f"rank {timeline.rank}"}}
    number_of = {thread: number for number, thread in enumerate(timeline.tracks(), 1)}
    for thread, number in number_of.items():
        yield {"ph": "M", "name": "thread_name", **here, "tid": number, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", **here, "tid": number, "args": {"sort_index": number}}
    stops: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for work in timeline.work:
        stops[work.item].append(work)
        yield {
            "ph": "X",
            "name": work.stage,
            "cat": "stage",
            **here,
            "tid": number_of[work.thread],
            "ts": microseconds(work.began),
            "dur": round(1e6 * (work.ended - work.began), 3),
            "args": {"batch": work.item[1], "pass": work.item[0]},
        }
    for item, way in stops.items():
        way.sort(key=lambda work: work.began)
        for i, work in enumerate(way if len(way) > 1 else []):
            phase = "s" if i == 0 else "f" if i == len(way) - 1 else "t"
            yield {
                "ph": phase,
                "name": "batch",
                "cat": "batch",
                "id": f"{item[0]}.{item[1]}",
                **here,
                "tid": number_of[work.thread],
                "ts": microseconds((work.began + work.ended) / 2),  # within the slice that it is tied to
                **({"bp": "e"} if phase == "f" else {}),
            }
    for level in timeline.levels:
        depths = {"items": level.depth, "room": max(level.capacity - level.depth, 0)}
        yield {"ph": "C", "name": f"queue behind {level.stage}", **here, "ts": microseconds(level.time), "args": depths}
    for resize in timeline.resizes:
        if resize.time >= start:
            yield {"ph": "i", "s": "p", "name": resize.text, "cat": "resize", **here, "ts": microseconds(resize.time)}


def draw(timeline: Timeline) -> Any:
    """Draw the timeline: a row per thread, below it how full the queues were. Returns a matplotlib figure.

    Raises:
        ModuleNotFoundError: There is no matplotlib, which the `plot` extra installs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tracks = timeline.tracks()
    stages = list(dict.fromkeys(level.stage for level in timeline.levels))
    height = 1.2 + 0.42 * len(tracks) + (1.6 if stages else 0)
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [0.42 * len(tracks) + 0.2, 1.3] if stages else [1]
    axes = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
    start = min((work.began for work in timeline.work), default=0.0)
    names = list(dict.fromkeys(work.stage for work in sorted(timeline.work, key=lambda work: work.began)))
    for row, thread in enumerate(tracks):
        for stage in names:
            spans = [
                (1e3 * (work.began - start), 1e3 * (work.ended - work.began))
                for work in timeline.work
                if work.thread == thread and work.stage == stage
            ]
            if spans:
                colour = _COLOURS.get(stage, _OTHER_COLOUR)
                axes[0].broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.4)
    axes[0].set_yticks(range(len(tracks)), [thread.removeprefix("mqgnn-") for thread in tracks])
    axes[0].invert_yaxis()
    axes[0].legend(
        handles=[Patch(color=_COLOURS.get(stage, _OTHER_COLOUR), label=stage) for stage in names],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(names) or 1,
        frameon=False,
    )
    for resize in timeline.resizes:
        for axis in axes:
            axis.axvline(1e3 * (resize.time - start), color="black", linewidth=0.8, linestyle=":")
    if stages:
        for stage in stages:
            levels = [level for level in timeline.levels if level.stage == stage]
            times = [1e3 * (level.time - start) for level in levels]
            colour = _COLOURS.get(stage, _OTHER_COLOUR)
            axes[1].step(times, [level.depth for level in levels], where="post", color=colour, label=f"behind {stage}")
            axes[1].step(
                times, [level.capacity for level in levels], where="post", color=colour, linewidth=0.8, linestyle="--"
            )
        axes[1].set_ylabel("items (dashed: room)")
        axes[1].set_ylim(0, 1.25 * max((level.capacity for level in timeline.levels), default=1))
        axes[1].legend(loc="upper right", fontsize="small", ncols=len(stages), frameon=False)
    axes[-1].set_xlabel("ms")
    return figure
