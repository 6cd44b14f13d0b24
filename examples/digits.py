"""The common part of the examples on handwritten digits: the data, the epochs, and the table of results."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

console = Console(highlight=False)
TEST = 360  # of 1797 images
APART = 0.03  # of the test digits: two trainings that round differently part, the more the fewer bits they have


def patches() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (training, test) of scikit-learn's own 8x8 digits, each (patches [B, 16, 4], labels [B])."""
    data = load_digits()
    images = data.images.astype(np.float32).reshape(-1, 4, 2, 4, 2) / 16
    x = images.transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
    order = np.random.default_rng(0).permutation(len(x))
    x, labels = x[order], data.target[order].astype(np.int32)
    return (x[TEST:], labels[TEST:]), (x[:TEST], labels[:TEST])


def batches(x: np.ndarray, labels: np.ndarray, size: int, steps: int, seed: int) -> Iterator[tuple]:
    """`steps` batches, epoch after epoch, in an order that only the seed decides."""
    random = np.random.default_rng(seed)
    order = np.concatenate([random.permutation(len(x)) for _ in range(-(-steps * size // len(x)))])
    for i in range(steps):
        chosen = order[i * size : (i + 1) * size]
        yield x[chosen], labels[chosen]


@dataclass
class Run:
    """The outcome of a training run. note: what else there is to say."""

    name: str
    loss: float
    accuracy: float
    seconds: float
    note: str = ""


def timed(name: str, train: Callable[[], tuple[Any, float, str]], accuracy: Callable[[Any], float]) -> Run:
    """Run `train() -> (parameters, last loss, note)`."""
    start = time.perf_counter()
    params, loss, note = train()
    seconds = time.perf_counter() - start
    run = Run(name, loss, accuracy(params), seconds, note)
    console.print(f"{name}: test accuracy {run.accuracy:.1%} after {seconds:.1f} s. {note}")
    return run


def report(runs: Sequence[Run], goal: float) -> bool:
    """Print the runs, jln's and the framework's by turns. Returns whether all reached the goal and no pair parted."""
    table = Table("layers", "last loss", "test accuracy", "seconds", title=f"{TEST} test digits, {jax.devices()[0]}")
    for run in runs:
        table.add_row(run.name, f"{run.loss:.4f}", f"{run.accuracy:.1%}", f"{run.seconds:.1f}")
    console.print(table)
    together = all(abs(a.accuracy - b.accuracy) <= APART for a, b in zip(runs[::2], runs[1::2], strict=True))
    return together and all(run.accuracy >= goal for run in runs)
