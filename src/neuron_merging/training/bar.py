"""training_progress: what a person sees of a run that trains: a bar with the time left, and a line per epoch."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from neuron_merging.training.runs import Epoch


class TrainingProgress:
    """A bar over all steps of all epochs; off a terminal there are only the lines."""

    def __init__(self, epochs: int, steps: int, done: int, *, quiet: bool) -> None:
        self._epochs, self._quiet = epochs, quiet
        self._console = Console(stderr=True, soft_wrap=True)
        left = TimeRemainingColumn(compact=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), left, TextColumn("left"))
        hidden = quiet or not self._console.is_terminal
        # Speed over two minutes: an epoch's test runs faster than its training.
        self._bar = Progress(*columns, console=self._console, disable=hidden, speed_estimate_period=120)
        self._task = self._bar.add_task("", total=epochs * steps, completed=done * steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, epoch: int, loss: float, accuracy: float) -> None:
        """The figures of the running epoch so far."""
        text = f"epoch {epoch + 1}/{self._epochs}  loss {loss:.4f}  accuracy {accuracy:.2f} %"
        self._bar.update(self._task, description=text)

    def advance(self, steps: int = 1) -> None:
        self._bar.advance(self._task, steps)

    def ended(self, line: Epoch) -> None:
        """A finished epoch."""
        if self._quiet:
            return
        test = "" if line.test_accuracy is None else f"  test {line.test_accuracy:.2f} %"
        self._console.print(
            f"epoch {line.epoch}/{self._epochs}  lr {line.lr:.4g}  loss {line.loss:.4f}  "
            f"accuracy {line.accuracy:.2f} %{test}  {line.seconds:.1f} s",
            highlight=False,
        )
