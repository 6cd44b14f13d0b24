"""Train the model of train_lm.py on many devices, without a change to it, and compare with one device step by step.

    python examples/data_and_tensor_parallel.py                 # every GPU here, or 8 virtual CPU devices as 4 x 2
    python examples/data_and_tensor_parallel.py --sequence      # the stream between the Linears split by sequence, too
    python examples/data_and_tensor_parallel.py --processes 2   # the same 8 as two processes, which this starts

On several machines, start it once on each, which differ in --process only:

    python examples/data_and_tensor_parallel.py --processes 2 --process 0 --coordinator first-machine:12345

The devices are a mesh. Along "data" each has its own sequences of the batch. Along "tensor" each has its own heads and
its own part of the MLP: the Linears behind the norms are split by columns, those that lead back by rows. What says so
are `zoo/sharding.py` and the axes that the zoo's models name; JAX's partitioner derives the rest, and asks jln how its
operators follow.

Between the Linears each device along "tensor" would do the same for the same tokens. With --sequence it has its part of
each sequence there (Megatron's sequence parallelism): a norm's result is gathered for the Linear behind it, and the sum
behind a Linear that leads back is scattered. That takes another rule of where the stream lies, and nothing else.
"""

import dataclasses
import functools
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

import program
from train_lm import CONFIGS, GPT, Config, load_corpus, make_optimizer, train_step, training_batch
from zoo.sharding import AXES, BATCH, on, shardings

VIRTUAL_DEVICES = 8  # of the CPU, in all processes together
# A mesh adds up in another order than one device, and training amplifies the difference. By how much, further runs on
# one device show, whose parameters all begin one rounding off. They are a few draws of what rounding can do, and the
# mesh is another: so this many times the largest that they have come to differ by is allowed, and as many roundings of
# the loss itself.
DRAWS, ALLOWED = 3, 8


def train(
    config: Config, seed: int, mesh: Mesh, text: np.ndarray, *, sequence: bool = False, draws: int = 0
) -> tuple[str, list[list[float]]]:
    """The compiled step's HLO, and the loss of every step of 1 + draws runs; only the first begins as `seed` says."""

    def new():
        model = GPT(config, nnx.Rngs(seed))
        return model, make_optimizer(model, config)

    def batch(step: int) -> jax.Array:  # each process adds what its own devices are to have
        rows = training_batch(text, config, seed, step)
        return jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P(BATCH)), rows.__getitem__)

    graph, abstract = nnx.split(nnx.eval_shape(new))
    initial = jax.jit(lambda: nnx.state(new()), out_shardings=shardings(abstract, mesh))  # each device its own part
    with on(mesh, sequence):
        step = train_step.lower(*nnx.merge(graph, initial()), batch(1)).compile()
    losses = []
    for draw in range(1 + draws):
        model, optimizer = nnx.merge(graph, initial())
        if draw:
            off = functools.partial(one_rounding_off, np.random.default_rng([seed, draw]), config.dtype)
            nnx.update(model, jax.tree.map(off, nnx.state(model, nnx.Param)))
        losses.append([float(step(model, optimizer, batch(i + 1))) for i in range(config.steps)])
    return step.as_text(), losses


def one_rounding_off(generator: np.random.Generator, dtype: str, parameter: jax.Array) -> jax.Array:
    """The parameter with each element up or down by the spacing of the numbers that the model computes in."""
    signs = generator.choice([-1.0, 1.0], parameter.shape)
    return parameter * (1 + float(jnp.finfo(dtype).eps) * signs).astype(parameter.dtype)


def print_collectives(hlo: str, console: Console) -> list[tuple[str, int]]:
    """Print what devices tell each other in a step. Returns the kinds and bytes of what is not a sum."""
    count = Counter()
    for each in program.collectives(hlo):
        count[each.kind, each.devices, each.bytes] += each.times
    table = Table("kind", title="Communication in one step, per device")
    for heading in ("among", "times", "bytes each", "bytes"):
        table.add_column(heading, justify="right")
    for (kind, devices, size), times in sorted(count.items(), key=str):
        table.add_row(kind, f"{devices}", f"{times}", f"{size:,}", f"{times * size:,}")
    table.add_row("in all", "", f"{count.total()}", "", f"{sum(key[2] * times for key, times in count.items()):,}")
    console.print(table)
    return [(kind, size) for kind, _, size in count if kind not in ("all-reduce", "reduce-scatter")]


def is_of_sequences(config: Config, data: int, kind: str, size: int) -> bool:
    """True for a collective that split sequences need.

    These are activations [B, T, C] gathered, of which XLA makes one of several; with them the gradient of the positions
    [T, C]; or the token behind a device's last.
    """
    sequences = config.batch // data
    positions = config.context * config.width * jnp.dtype(config.dtype).itemsize
    of_tokens = kind == "collective-permute" and size <= sequences * jnp.int32.dtype.itemsize
    return of_tokens or (kind == "all-gather" and size % (sequences * positions) in (0, positions))


def print_losses(mesh: list[float], one_device: list[list[float]], console: Console) -> bool:
    """Print the losses side by side. Returns whether the mesh's are those of one device, but for rounding."""
    table = Table(title="Loss, nats per byte")
    for heading in ("step", "mesh", "one device", "difference", "allowed"):
        table.add_column(heading, justify="right")
    verdicts, seen = [], 0.0
    for step, (a, b, *others) in enumerate(zip(mesh, *one_device, strict=True), 1):
        seen = max(seen, *(abs(other - b) for other in others))
        allowed = ALLOWED * (seen + float(np.finfo(np.float32).eps) * abs(b))
        verdicts.append(abs(a - b) <= allowed)  # a NaN is a difference
        verdict = "" if verdicts[-1] else "  DIFFERS"
        table.add_row(f"{step}", f"{a:.7f}", f"{b:.7f}", f"{abs(a - b):.1e}", f"{allowed:.1e}{verdict}")
    console.print(table)
    return all(verdicts)


def start(processes: int, timeout: float) -> int:
    """Run this command as so many processes of this machine. Returns 0, or the exit status of the first that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--coordinator", coordinator, "--process"]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through the `finally` below
    deadline, children = time.monotonic() + timeout, []
    try:
        for number in range(processes):
            # A group of its own: a Ctrl-C comes here alone, and is no traceback of each.
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            children.append(subprocess.Popen([*command, str(number)], env=environment, process_group=0))
        while time.monotonic() < deadline:
            statuses = [child.poll() for child in children]
            if failed := [(i, status) for i, status in enumerate(statuses) if status]:
                number, status = failed[0]
                print(f"process {number} failed with status {status}; the others are stopped", file=sys.stderr)
                return status if status > 0 else 128 - status  # as a shell tells of a signal
            if all(status == 0 for status in statuses):
                return 0
            time.sleep(0.1)
        print(f"not done in {timeout} s; the processes are stopped", file=sys.stderr)
        return 1
    finally:
        for child in children:  # those that wait for one that is gone hear nothing milder
            child.kill()
            child.wait()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    processes: Annotated[int, typer.Option(min=1, help="How many there are; more than one talk to each other.")] = 1,
    process: Annotated[int | None, typer.Option(min=0, help="Which one this is. [default: start all, here]")] = None,
    coordinator: Annotated[str | None, typer.Option(help="host:port of process 0, which is to listen there.")] = None,
    sequence: Annotated[bool, typer.Option("--sequence", help="Split sequences over tensor between Linears.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that processes started here may take.")] = 600,
):
    """Train the model of train_lm.py on a mesh of devices, and compare with one device step by step."""
    if (process is None) != (coordinator is None):
        raise typer.BadParameter("one needs the other", param_hint="--process and --coordinator")
    if process is None and processes > 1:
        raise typer.Exit(start(processes, timeout))
    if process is not None and process >= processes:
        raise typer.BadParameter(f"they are 0 to {processes - 1}", param_hint="--process")
    jax.config.update("jax_num_cpu_devices", max(1, VIRTUAL_DEVICES // processes))
    if process is not None:
        jax.distributed.initialize(coordinator, processes, process)
    console = Console(highlight=False, quiet=jax.process_index() != 0)

    devices = jax.devices()
    tensor = math.gcd(len(devices), 2)
    data, automatic = len(devices) // tensor, (AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh((data, 1, tensor), AXES, automatic, devices=devices)
    single = jax.make_mesh((1, 1, 1), AXES, automatic, devices=jax.local_devices()[:1])
    config = CONFIGS["cpu" if jax.default_backend() == "cpu" else "gpu"]
    batch = math.ceil(config.batch / data) * data
    config = dataclasses.replace(config, steps=steps, batch=batch)
    console.print(f"mesh: {data} data x {tensor} tensor; {len(devices)} x {devices[0].device_kind}")
    console.print(f"{jax.process_count()} processes; batch of {batch} x {config.context} bytes, {config.dtype}")

    text = load_corpus()[0]
    started = time.perf_counter()
    hlo, (losses,) = train(config, seed, mesh, text, sequence=sequence)
    besides_sums = print_collectives(hlo, console)
    as_meant = all(sequence and is_of_sequences(config, data, *each) for each in besides_sums)
    console.print(f"{steps} steps in {time.perf_counter() - started:.1f} s, with compilation")
    if jax.process_index() != 0:  # one is enough for what one device does
        return
    same = print_losses(losses, train(config, seed, single, text, draws=DRAWS)[1], console)
    console.print(f"{'the same' if same else 'NOT the same'} loss as on one device", end="; ")
    meant = "sums and gathered activations" if sequence else "sums"
    console.print(f"nothing but {meant} is communicated" if as_meant else f"MORE than {meant} is communicated")
    if not (same and as_meant):
        raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    app()
