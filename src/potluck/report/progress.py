"""A run as it goes on: a live bar on a terminal, a plain line now and then elsewhere."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from potluck.pool.candidates import Candidate
from potluck.pool.launch import Event
from potluck.pool.listener import Listener
from potluck.pool.plan import Plan
from potluck.pool.result import Evaluated
from potluck.report.plans import candidates_table, impossible, predicted_table
from potluck.report.scores import in_words
from potluck.report.screen import Screen
from potluck.report.tables import plan_table

_LINE_EVERY_S = 5.0
_LINE_EVERY_PART = 0.1
_RECENT = 10


class Live(Screen, Listener):
    """A listener that shows a run on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._plan: Plan | None = None
        self._shares_shown = False
        self._weights_mib: dict[int, float] = {}
        self._steps: list[Event] = []
        self._line_s = float("-inf")
        self._line_step = 0

    def invited(self, invite: str, peers: int, minutes: float) -> None:
        """Show what to run on the other machines."""
        others = "one other machine" if peers == 1 else f"{peers} other machines"
        self.tell(f"Waiting for {others}. Run there, within {minutes:g} minutes:")
        self.tell(f"\n  potluck join {invite}\n")

    def chosen(self, candidates: Sequence[Candidate], chosen: Candidate, if_data_moved: str | None) -> None:
        """Show which plans there are, what the chosen one predicts, and why it was chosen."""
        if len(candidates) > 1:
            self.console.print(candidates_table(candidates, chosen))
            for reason in impossible(candidates):
                self.tell(reason)
        self.console.print(predicted_table(chosen))
        self._shares_shown = True
        for sentence in (chosen.reason, if_data_moved):
            if sentence:
                self.tell(sentence)

    def planned(self, plan: Plan) -> None:
        """Keep the plan until every device has said how much it holds."""
        self._plan = plan

    def scoring(self, when: str, done: int, total: int) -> None:
        """Move the bar of the scoring."""
        self.show(f"Scoring {when} training", done, total)

    def scored(self, when: str, scores: Evaluated) -> None:
        """Show the scores."""
        self.finish()
        self.tell(f"Held-out examples {when} training: {in_words(scores)}.")

    def event(self, event: Event) -> None:
        """Show an event of a device."""
        if event["event"] == "loaded":
            self._loaded(event["rank"], event["weights_mib"])
        elif event["event"] == "data":
            self._told_data(event)
        elif event["event"] == "begin":
            self.tell(f"{event['steps']:,} steps.")
        elif event["event"] == "ran_out":
            self.tell(f"{self._name(event['owner'])} has no more examples in this epoch; the others go on.")
        elif event["event"] == "step":
            self._stepped(event)
        elif event["event"] == "saving":
            self.finish()
            self.tell("Saving.")

    def _loaded(self, rank: int, weights_mib: float) -> None:
        self._weights_mib[rank] = weights_mib
        if self._plan is not None and len(self._weights_mib) == len(self._plan.devices):
            held = [self._weights_mib[rank] for rank in sorted(self._weights_mib)]
            if self._shares_shown:
                each = (f"{share.name} {mib:,.0f} MiB" for share, mib in zip(self._plan.devices, held, strict=True))
                if not self._steps:  # the ranks of a launcher tell all they have to tell at the end
                    self.tell(f"Weights: {', '.join(each)}.")
            else:
                self.console.print(plan_table(self._plan, held))

    def _name(self, rank: int) -> str:
        return f"device {rank}" if self._plan is None else self._plan.devices[rank].name

    def _told_data(self, event: Event) -> None:
        whose = f"{self._name(event['rank'])}: " if self._plan is not None and len(self._plan.devices) > 1 else ""
        self.tell(f"{whose}{event['examples']:,} examples.")
        if event["cut"]:
            self.tell(
                f"{event['cut']:,} examples were longer than {event['most']:,} tokens (data.max_length, or the model's"
                " positions) and were cut."
            )
        if dropped := event["dropped"]:
            some = ", ".join(str(where) for where in dropped[:5]) + (", ..." if len(dropped) > 5 else "")
            self.tell(f"{len(dropped):,} examples were dropped, since no answer was left after cutting: {some}.")

    def _stepped(self, event: Event) -> None:
        self._steps = [*self._steps[-_RECENT + 1 :], event]
        detail = describe(self._steps)
        self.show("Training", event["step"], event["steps"], detail)
        if self.console.is_terminal:
            return
        now, step, steps = time.monotonic(), event["step"], event["steps"]
        due = now - self._line_s >= _LINE_EVERY_S or step - self._line_step >= _LINE_EVERY_PART * steps
        if due or step == steps:
            self._line_s, self._line_step = now, step
            left_s = (steps - step) * sum(recent["step_s"] for recent in self._steps) / len(self._steps)
            self.tell(f"step {step}/{steps}  {detail}  {left_s:.0f} s left")


def describe(steps: Sequence[dict[str, Any]]) -> str:
    """The last loss, and over the given steps: tokens per second, each device's busy and waiting share of the time."""
    time_s = sum(step["step_s"] for step in steps) or 1.0
    shares = " ".join(_busy_and_waiting(clocks) for clocks in zip(*(step["devices"] for step in steps), strict=True))
    tokens_per_s = sum(step["tokens"] for step in steps) / time_s
    return f"loss {steps[-1]['loss']:.3f}  {tokens_per_s:,.0f} tokens/s  busy/waiting {shares}"


def _busy_and_waiting(clocks: Sequence[dict[str, float]]) -> str:
    """Of the device's own time: devices do not all begin a step at the same moment."""
    compute_s, wait_s, transfer_s = (sum(c[f"{what}_s"] for c in clocks) for what in ("compute", "wait", "transfer"))
    time_s = (compute_s + wait_s + transfer_s) or 1.0
    return f"{compute_s / time_s:.0%}/{wait_s / time_s:.0%}"
