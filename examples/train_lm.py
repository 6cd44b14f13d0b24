"""Train a byte-level GPT on the source code of Python's own standard library, its loss fused by jln in one line.

    python examples/train_lm.py                      # two to three minutes on two CPU cores
    python examples/train_lm.py --norm flax          # the same loss, not fused
    python examples/train_lm.py --resume             # go on after Ctrl-C, exactly as if it had not happened

It prints what `jln.explain` finds in the loss; how near its gradients are to those of the loss as it is; what both keep
from forward to backward, and how fast both step. Then it trains. The text is on every machine that can run this file:
nothing is downloaded. A GPU gets a larger model in bfloat16.
Words used in shapes: B sequences in a batch, T bytes in a context, C the width, D the width of one attention head.
"""

import functools
import json
import math
import pathlib
import signal
import sysconfig
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import typer
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jln
from zoo.gpt import gpt
from zoo.parts import Size

Loss = Callable[..., jax.Array]  # of a model and a batch
console = Console(highlight=False)
STARTED = time.perf_counter()


@dataclass(frozen=True)
class Config:
    """Everything that decides what is trained, and how. It is saved in every checkpoint."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    learning_rate: float
    dtype: str  # of activations; parameters and their optimizer state are always float32
    steps: int
    evaluate_every: int  # and save a checkpoint

    @property
    def size(self) -> Size:
        """The zoo's words for the model's size."""
        shape = (self.batch, self.context, self.width, self.heads, self.heads, self.width // self.heads)
        precision = {"dtype": self.dtype, "norm_dtype": self.dtype, "attention": None}
        return Size(*shape, hidden=4 * self.width, layers=self.layers, **precision)


CONFIGS = {
    "cpu": Config(4, 128, 4, 128, 16, 4e-3, "float32", steps=800, evaluate_every=50),
    "gpu": Config(8, 512, 8, 512, 32, 1e-3, "bfloat16", steps=2000, evaluate_every=200),
}
INTRODUCTION = """\
A GPT of {parameters:.1f} million parameters, in Flax's own layers, learns the source code of
Python's standard library: {learnt:,} bytes, {held_out:,} of other files to validate.
It runs on {backend} in {dtype}. Its loss is fused in one line:

    fused_loss = jln.fuse(loss_fn, linears=True)

You will see what that found; beside Flax's layers its gradients, memory and speed; how
the loss falls in {steps} steps, by {norm}; and what the model then writes. All of it
takes two to three minutes on two quiet CPU cores, at the default of 800 steps.
"""
STEPS_IN_A_ROUND = 2  # of the comparison of speeds: short rounds, so that two in turn see the same machine
GOAL = 1.8  # nats per byte on validation text; the time at which it is passed is reported
# ||a - b|| / ||b|| allowed between jln's gradients and Flax's. Both round to `dtype` at slightly different
# values, and a flipped rounding travels through every layer below. Seen on the CPU over 8 layers: float32 3e-7;
# bfloat16 1e-2 from its own float32, so twice that between two of its kind; a dx rule with a wrong term 3e-1.
GRADIENT_TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


def load_corpus(limit: int = 12_000_000) -> tuple[np.ndarray, np.ndarray]:
    """The standard library's source as (train, validation) bytes; every 20th file is held out, whole, to validate."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    # `encodings` is a hundred near-copies of one table: split by file, it would leak the answers into training.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    files = [path for path in sorted(root.rglob("*.py")) if skipped.isdisjoint(path.relative_to(root).parts)]
    train = b"".join(path.read_bytes() for i, path in enumerate(files) if i % 20 != 0)
    validation = b"".join(path.read_bytes() for path in files[::20])
    return np.frombuffer(train[:limit], np.uint8), np.frombuffer(validation[:limit], np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """Rows of `context + 1` bytes [B, T + 1]: the model reads all but the last and predicts all but the first."""
    return text[starts[:, None] + np.arange(context + 1)]


def training_batch(text: np.ndarray, config: Config, seed: int, step: int) -> np.ndarray:
    """A batch that depends on nothing but (seed, step), so a resumed run sees the same data in the same order."""
    starts = np.random.default_rng([seed, step]).integers(len(text) - config.context, size=config.batch)
    return windows(text, starts, config.context)


class GPT(nnx.Module):
    """Bytes in, logits of the next byte out, by the zoo's GPT: Flax's own layers, which know nothing of jln."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        embed = functools.partial(nnx.Embed, features=config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.bytes = embed(256)
        self.positions = embed(config.context)
        self.trunk = gpt(config.size, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T] -> [B, T, 256]
        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        return self.bytes.attend(self.trunk(x)).astype(jnp.float32)


def loss_fn(model: GPT, batch: jax.Array) -> jax.Array:
    """Mean nats per byte over a batch of windows [B, T + 1]."""
    tokens = batch.astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


# The one line: every norm of the loss, with the sum in front and the Linears behind, is then one operator.
fused_loss = jln.fuse(loss_fn, linears=True)
LOSSES = {"jln": fused_loss, "flax": loss_fn}


@functools.partial(nnx.jit, donate_argnums=(0, 1), static_argnames="loss_fn")
def train_step(model: GPT, optimizer: nnx.Optimizer, batch: jax.Array, loss_fn: Loss = fused_loss) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def evaluate(model: GPT, batches: jax.Array) -> jax.Array:
    """Mean loss over batches [n, B, T + 1], one after another: all at once would need n times the memory."""
    return jax.lax.map(functools.partial(loss_fn, model), batches).mean()


def make_optimizer(model: GPT, config: Config) -> nnx.Optimizer:
    peak, warmup = config.learning_rate, min(100, config.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, end_value=peak / 20)
    matrices_only = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.1, mask=matrices_only)
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)


def named_gradients(model: GPT, loss_fn: Loss, batch: np.ndarray) -> dict[str, np.ndarray]:
    gradients = nnx.jit(nnx.grad(loss_fn))(model, batch)
    return {".".join(map(str, path)): np.float64(leaf[...]) for path, leaf in nnx.to_flat_state(gradients)}


def gradients_agree(model: GPT, config: Config, batch: np.ndarray) -> bool:
    """Print how far the fused loss's gradients are from those of the loss as it is: of groups, where they disagree."""
    ours, truth = (named_gradients(model, loss_fn, batch) for loss_fn in LOSSES.values())
    groups = {name: [name] for name in truth if "norm." in name}
    groups |= {"all other weights": [name for name in truth if name not in groups], "all parameters": list(truth)}
    tolerance = GRADIENT_TOLERANCE[config.dtype]
    table = Table("parameter", "max |grad|", "max |diff|", "relative", f"<={tolerance:.0e}")
    apart = []
    for label, names in groups.items():
        a, b = (np.concatenate([side[name].ravel() for name in names]) for side in (ours, truth))
        apart.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
        verdict = "yes" if apart[-1] <= tolerance else "NO"
        row = (f"{np.abs(b).max():.2e}", f"{np.abs(a - b).max():.2e}", f"{apart[-1]:.1e}", verdict)
        table.add_row(label.removeprefix("trunk."), *row)
    agree = all(of_group <= tolerance for of_group in apart)  # a NaN is a disagreement
    if agree:
        console.print(f"gradients: at most {max(apart):.0e} from those by Flax's layers ({tolerance:.0e} is allowed)")
    else:
        console.print("jln's gradients disagree with Flax's:", table)
    return agree


def held_bytes(model: GPT, loss_fn: Loss, batch: np.ndarray) -> int:
    """The bytes that one step's forward pass leaves for its backward pass, each array once and parameters aside."""
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def left_by_forward(parameters):
        return jax.tree.leaves(jax.vjp(lambda p: loss_fn(nnx.merge(graph, p, rest), batch), parameters)[1])

    program = jax.make_jaxpr(left_by_forward)(parameters).jaxpr
    held = {id(v): v.aval for v in program.outvars if v not in program.invars}
    return sum(a.size * a.dtype.itemsize for a in held.values())


def step_seconds(config: Config, batch: np.ndarray, rounds: int = 7) -> list[np.ndarray]:
    """The seconds of a step by each loss [rounds], of new models; in turn, as a machine is not as fast at all times."""
    models = [GPT(config, nnx.Rngs(0)) for _ in LOSSES]
    optimizers = [make_optimizer(model, config) for model in models]
    seconds = np.zeros((len(LOSSES), 1 + rounds))
    for i in range(1 + rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            loss_fn, start = [*LOSSES.values()][which], time.perf_counter()
            for _ in range(STEPS_IN_A_ROUND):
                loss = train_step(models[which], optimizers[which], batch, loss_fn=loss_fn)
            loss.block_until_ready()
            seconds[which, i] = (time.perf_counter() - start) / STEPS_IN_A_ROUND
    return list(seconds[:, 1:])  # the first round compiles


def print_comparison(model: GPT, config: Config, batch: np.ndarray):
    """Print what a step of the fused loss keeps, and how fast it is, beside the loss as it is."""
    held = [held_bytes(model, of, batch) / 2**20 for of in (fused_loss, jln.fuse(loss_fn), loss_fn)]
    kept = "{:.1f} MiB fused ({:.1f} without linears=True), {:.1f} by Flax's layers".format(*held)
    console.print(f"kept from forward to backward: {kept}", soft_wrap=True)
    ours, flax = step_seconds(config, batch)
    each = f"{1 / np.median(ours):.1f} fused, {1 / np.median(flax):.1f} by Flax's layers"
    ratios = flax / ours
    spread = f"the median of {len(ratios)} rounds in turn; {min(ratios):.2f} to {max(ratios):.2f}"
    console.print(f"steps a second: {each}, a ratio of {np.median(ratios):.2f} ({spread})", soft_wrap=True)
    if jax.default_backend() == "cpu":
        console.print("  (on a CPU XLA runs the operators: the kernels, and their speed, are a GPU's)")
    console.print()


@functools.partial(nnx.jit, static_argnames="count")
def continue_text(model: GPT, window: jax.Array, length: int, key: jax.Array, temperature: float, count: int):
    """Draw `count` bytes after the first `length` of `window` [T]. Shapes never change: one compilation for all."""

    def draw(carry, key):
        window, length = carry
        logits = model(window[None])[0, length - 1]  # what lies behind `length` is hidden by the causal mask
        byte = jax.random.categorical(key, logits / temperature)
        window = jnp.where(length == window.size, jnp.roll(window, -1), window)  # a full one forgets its oldest byte
        length = jnp.minimum(length + 1, window.size)
        return (window.at[length - 1].set(byte), length), byte

    return jax.lax.scan(draw, (window, length), jax.random.split(key, count))[1]


def sample(model: GPT, config: Config, prompt: str, count: int, temperature: float, seed: int) -> str:
    known = f"\n{prompt}".encode()[-config.context :]  # the newline says that a line begins here
    window = np.zeros(config.context, np.int32)
    window[: len(known)] = list(known)
    drawn = continue_text(model, window, len(known), jax.random.key(seed), temperature, count)
    return prompt + bytes(drawn.tolist()).decode(errors="replace")


def save(manager: ocp.CheckpointManager, step: int, model: GPT, optimizer: nnx.Optimizer, record: dict):
    state = ocp.args.StandardSave({"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    manager.save(step, args=ocp.args.Composite(state=state, record=ocp.args.JsonSave(record)), force=True)


def restore(manager: ocp.CheckpointManager, step: int, model: GPT, optimizer: nnx.Optimizer):
    state = ocp.args.StandardRestore({"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    restored = manager.restore(step, args=ocp.args.Composite(state=state))["state"]
    nnx.update(model, restored["model"])
    nnx.update(optimizer, restored["optimizer"])


def train(
    model, optimizer, config: Config, loss_fn: Loss, texts, manager: ocp.CheckpointManager, record: dict, minutes: float
):
    """Take the steps that `record` does not hold yet, adding to it every train loss and every evaluation."""
    train_text, validation_text = texts
    starts = np.linspace(0, len(validation_text) - config.context - 1, 256).astype(int)  # the same ones every time
    validation = windows(validation_text, starts, config.context).reshape(-1, config.batch, config.context + 1)
    first, earlier = len(record["train_loss"]) + 1, record["seconds"]
    waiting = []  # losses not fetched yet: to wait for each one would leave a GPU idle between steps
    stop = threading.Event()  # set by Ctrl-C: the step in flight finishes first, so that what is saved is whole
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("compiling", total=config.steps, completed=first - 1)
        for step in range(first, config.steps + 1):
            batch = training_batch(train_text, config, record["seed"], step)
            waiting.append(train_step(model, optimizer, batch, loss_fn=loss_fn))
            last = step == config.steps or stop.is_set() or time.perf_counter() - STARTED > 60 * minutes
            if last or step % 10 == 0:
                record["train_loss"] += [float(loss) for loss in waiting]
                waiting.clear()
                progress.update(bar, completed=step, description=f"train {record['train_loss'][-1]:.3f}")
            if last or step % config.evaluate_every == 0:
                loss, recent = float(evaluate(model, validation)), np.mean(record["train_loss"][-25:])
                record["seconds"] = round(earlier + time.perf_counter() - STARTED, 1)
                record["evaluations"].append({"step": step, "seconds": record["seconds"], "loss": loss})
                seen = f"train {recent:.4f}  validation {loss:.4f} nats per byte"
                console.print(f"step {step:5d}  {record['seconds']:6.1f} s  {seen}")
                save(manager, step, model, optimizer, record)
            if last:
                break
    signal.signal(signal.SIGINT, before)


def plot(record: dict, path: pathlib.Path):
    losses = np.array(record["train_loss"])
    span = min(25, len(losses))
    smooth = np.convolve(losses, np.ones(span) / span, mode="valid")
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # without pyplot there is no window to need a display
    axes = figure.subplots()
    axes.plot(np.arange(len(losses)) + 1, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(np.arange(span, len(losses) + 1), smooth, color="tab:blue", label=f"train, mean of {span} steps")
    evaluated = np.array([[row["step"], row["loss"]] for row in record["evaluations"]])
    axes.plot(*evaluated.T, color="tab:orange", marker="o", markersize=4, label="validation, held-out files")
    axes.axhline(GOAL, color="gray", linestyle=":", label=f"goal, {GOAL}")
    axes.set(xlabel="step", ylabel="nats per byte", title="A byte-level GPT learns Python's standard library")
    bits = (lambda nats: nats / math.log(2), lambda bits: bits * math.log(2))
    axes.secondary_yaxis("right", functions=bits).set_ylabel("bits per byte")
    axes.set_ylim(min(losses.min(), GOAL) - 0.1, 4)  # the first steps fall from 5.5, which is blind guessing
    axes.legend()
    figure.savefig(path, dpi=150)


def main(
    norm: Annotated[Literal["jln", "flax"], typer.Option(help="By whom; checkpoints fit both.")] = "jln",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps. [default: by device]")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Stop after so many; --resume goes on.")] = math.inf,
    out: Annotated[pathlib.Path, typer.Option(file_okay=False, help="Results.")] = pathlib.Path("runs/train_lm"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights, batches and sample. [default: 0]")] = None,
    prompt: Annotated[str, typer.Option(help="What the sample begins with.")] = "def ",
    sample_bytes: Annotated[int, typer.Option(min=1, help="Length of the sample.")] = 400,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sample; lower is more cautious.")] = 0.7,
):
    """Train a byte-level GPT on the source code of Python's standard library, with jln's norms."""
    checkpoints = out.absolute() / "checkpoints"  # orbax wants an absolute path
    newest = max((int(path.name) for path in checkpoints.glob("*") if path.name.isdigit()), default=0)
    if resume and not newest:
        raise typer.BadParameter(f"there is no checkpoint in {checkpoints}", param_hint="--resume")
    if newest and not resume:  # never overwrite what took time to train
        checkpoints.rename(checkpoints.with_name(time.strftime("checkpoints-before-%Y%m%d-%H%M%S")))

    texts, backend = load_corpus(), jax.default_backend()
    record = {"config": asdict(CONFIGS["cpu" if backend == "cpu" else "gpu"]), "seed": seed or 0}
    record |= {"corpus": zlib.crc32(texts[0]), "seconds": 0.0, "train_loss": [], "evaluations": []}
    manager = ocp.CheckpointManager(checkpoints, options=ocp.CheckpointManagerOptions(max_to_keep=2))
    if resume:
        saved = manager.restore(newest, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        if saved["corpus"] != record["corpus"]:
            raise typer.BadParameter("the checkpoint learnt another Python's library", param_hint="--resume")
        if seed not in (None, saved["seed"]):
            raise typer.BadParameter(f"the checkpoint was made with {saved['seed']}", param_hint="--seed")
        if (steps or saved["config"]["steps"]) <= newest:
            raise typer.BadParameter(f"{newest} steps are already done: give more", param_hint="--steps")
        record = saved
    record["config"]["steps"] = steps or record["config"]["steps"]
    config = Config(**record["config"])
    model = GPT(config, nnx.Rngs(record["seed"]))
    optimizer = make_optimizer(model, config)
    if resume:
        restore(manager, newest, model, optimizer)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    shown = {"parameters": parameters / 1e6, "backend": backend, "dtype": config.dtype, "steps": config.steps}
    console.print(INTRODUCTION.format(learnt=len(texts[0]), held_out=len(texts[1]), norm=norm, **shown), soft_wrap=True)
    next_batch = training_batch(texts[0], config, record["seed"], step=len(record["train_loss"]) + 1)
    console.print(str(jln.explain(fused_loss, model, next_batch)), markup=False, soft_wrap=True)
    if not gradients_agree(model, config, next_batch):
        console.print("not training")
        raise typer.Exit(1)
    if not resume:  # who goes on has seen it
        print_comparison(model, config, next_batch)
    train(model, optimizer, config, LOSSES[norm], texts, manager, record, minutes)
    manager.close()  # waits until the last checkpoint is on disk
    (out / "metrics.json").write_text(json.dumps(record))
    plot(record, out / "loss.png")

    console.rule(f"a sample, at temperature {temperature}")
    drawn = sample(model, config, prompt, sample_bytes, temperature, record["seed"])
    console.print(drawn, markup=False, soft_wrap=True)
    console.rule()
    nats, done = record["evaluations"][-1]["loss"], record["evaluations"][-1]["step"]
    console.print(f"validation loss {nats:.4f} nats per byte = {nats / math.log(2):.4f} bits per byte")
    passed = next((row for row in record["evaluations"] if row["loss"] < GOAL), None)
    when = f"first seen after {passed['seconds']} s, at step {passed['step']}" if passed else "not reached"
    console.print(f"below {GOAL} nats per byte: {when}; {record['seconds']} s in all")
    console.print(f"loss.png, metrics.json and checkpoints are in {out}")
    if done < config.steps:
        console.print(f"stopped at step {done} of {config.steps}: go on with --resume")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    app()
