# ruff: noqa: E402 - MaxText is imported behind what stands in for packages that it imports
"""Fuse MaxText's own models and training step, and compare them with themselves: losses, gradients and parameters.

    pip install --no-deps maxtext==0.2.5 omegaconf==2.4.0    # Python 3.12 or newer, with jln's extra `test`
    python tests/real/maxtext_models.py     # two minutes, nothing is downloaded
    python tests/real/maxtext_models.py moved [Llama]    # bytes, with jax[cuda13] and jax-triton; two minutes

First small models by MaxText's own configurations, on one device: the norms and sums that `jln.fuse` finds in
MaxText's loss, and the largest difference of any gradient, as a part of that gradient's largest element. Then a step of
its trainer, by SGD, on meshes of 8 devices: the difference of what it adds to the parameters, and what the devices
communicate. MaxText takes a norm in float32 whatever it is told, so all is compared in float32. Exits with 1 where a
number differs, other norms and sums are found than listed, or the fused step communicates more than listed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # MaxText's own stand-ins for Google Cloud

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax._src.cudnn import fused_attention_stablehlo as attention

# What MaxText imports for data, tokenizers, checkpoints, quantisation and TPUs' kernels; the tests need nothing of it.
ABSENT = "PIL aqt drjax grain huggingface_hub jinja2 ml_collections pathwaysutils sentencepiece sympy tiktoken tokamax"
ABSENT += " tokenizers transformers"


class _Forgiving(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    __or__ = __ror__ = lambda cls, other: cls


class _Anything(metaclass=_Forgiving):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Absent(MetaPathFinder, Loader):
    """Modules of which every attribute is one empty class."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT.split() else None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(__getattr__=lambda name: _Anything, __version__="9", __file__=None)


logging.getLogger("absl").setLevel(logging.ERROR)
sys.meta_path.insert(0, _Absent())
with contextlib.redirect_stdout(io.StringIO()):
    import maxtext
    from maxtext.configs import pyconfig
    from maxtext.layers import normalizations
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils, maxtext_utils_nnx, model_creation_utils, sharding, train_utils

import jln
import jln.nnx
import program
from compared import difference, judged
from jln._triton.chip import chip_by_name
from jln._triton.target import Gpu, using

LAYERS, WIDTH, WORDS = 2, 32, 64


class Real(NamedTuple):
    """A configuration of MaxText's; one scanned layer counts once.

    norms, sums: those to be found. linears: norms that are one operator with the Linears behind, unasked and asked for
      all. left: norms that are left to XLA.
    """

    model: str
    scanned: bool
    remat: str
    norms: int = 0
    sums: int = 0
    linears: tuple[int, int] = (0, 0)
    left: int = 0
    layers: int = LAYERS

    def options(self) -> dict[str, Any]:
        of = {"model_name": self.model, "scan_layers": self.scanned, "remat_policy": self.remat}
        return of | {"base_num_decoder_layers": self.layers}


# Each layer is a jax.checkpoint, and a layer's last sum is in another than the next layer's first norm: not found are
# therefore half of Llama's and Qwen's sums. In Gemma 2, of which MaxText's layer is two, a norm stands in front of each
# sum. Unasked, norms are one operator with Linears where the policy "minimal" keeps what the Linears make.
MODELS = [
    Real("llama2-7b", True, "minimal", 3, 1, (2, 3)),
    Real("llama2-7b", False, "full", 2 * LAYERS + 1, LAYERS, (0, 2 * LAYERS + 1)),
    # Left are the norms of queries and keys, which XLA makes again inside of what reads them.
    Real("qwen3-8b", True, "full", 3, 1, (0, 3), left=2),
    Real("qwen3-8b", False, "minimal", 2 * LAYERS + 1, LAYERS, (2, 2 * LAYERS + 1), left=2 * LAYERS),
    Real("gemma2-9b", True, "minimal", 9, 4, (1, 5)),
    Real("gemma2-9b", False, "full", 9, 4, (0, 5), layers=1),
]


# By name MaxText's options of a training step of Llama's on a mesh, and the collectives and their bytes that the fused
# step may have more than the untouched one, with Linears unasked and asked for.
MESHES: dict[str, tuple[dict[str, int], tuple[tuple[int, int], tuple[int, int]]]] = {
    # The gradients of the norms' scales are sharded as the scales are, each by a reduce-scatter of its own; untouched,
    # XLA adds them to another gradient's all-reduce.
    "data 2, fsdp 4": (
        {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4, "gradient_accumulation_steps": 2},
        ((10, 0), (10, 0)),
    ),
    "data 2, fsdp 2, tensor 2": (
        {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
        ((0, 0), (0, 0)),
    ),
}


def config_of(*, own_sizes: bool = False, **own: Any) -> Any:
    sizes = {"base_emb_dim": WIDTH, "base_mlp_dim": 3 * WIDTH, "base_num_query_heads": 4, "base_num_kv_heads": 2}
    sizes |= {"head_dim": 8, "vocab_size": WORDS, "max_target_length": 16}
    kind = {"attention": "dot_product", "dtype": "float32", "dataset_type": "synthetic", "hardware": "cpu"}
    quiet = {"run_name": "x", "base_output_directory": "/nowhere", "enable_checkpointing": False, "jax_cache_dir": ""}
    quiet |= {"override_model_config": True, "skip_jax_distributed_system": True, "log_config": False}
    base = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
    arguments = [f"{name}={value}" for name, value in (({} if own_sizes else sizes) | kind | quiet | own).items()]
    with contextlib.redirect_stdout(io.StringIO()):
        return pyconfig.initialize(["", str(base), *arguments])


@contextlib.contextmanager
def context(config: Any, mesh: jax.sharding.Mesh) -> Iterator[None]:
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        yield


def moved(parameters: Any) -> Any:
    """Move the parameters a little: norms' scales are all 1 at first."""
    r = np.random.default_rng(2)
    noisy = lambda a: a + 0.1 * r.normal(size=a.shape).astype(a.dtype)  # noqa: E731
    return jax.tree.map(lambda a: jax.device_put(noisy(a), a.sharding), parameters)


def batch_of(config: Any) -> dict[str, Any]:
    r, shapes = np.random.default_rng(0), maxtext_utils.get_shaped_batch(config)
    batch = {name: jnp.ones(a.shape, a.dtype) for name, a in shapes.items()}  # of the segmentations
    for name in ("inputs", "targets"):
        batch[name] = jnp.asarray(r.integers(0, WORDS, batch[name].shape), jnp.int32)
        batch[f"{name}_position"] = jnp.broadcast_to(jnp.arange(batch[name].shape[1]), batch[name].shape)
    return batch


def loss_of(loss_fn: Callable[..., Any], config: Any, graph: Any) -> Callable[..., jax.Array]:
    """Return what MaxText's loss makes of a model's parameters, of the rest of its state, and of a batch."""
    return lambda parameters, rest, batch: loss_fn(
        nnx.merge(graph, parameters, rest, copy=True), config, dict(batch), None, None
    )[0]


def checked(real: Real) -> bool:
    config = config_of(per_device_batch_size=0.25, **real.options())
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
    make, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)
    with context(config, mesh):
        model = maxtext_utils_nnx.create_nnx_sharded_model(abstract, make, mesh)
    nnx.pop(model, nnx.Intermediate)
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    parameters, batch = moved(parameters), batch_of(config)

    def with_model(loss_fn: Callable[..., Any]) -> Callable[[Any], jax.Array]:
        loss = loss_of(loss_fn, config, graph)
        return lambda parameters: loss(parameters, rest, batch)

    layers = f"{'scanned' if real.scanned else 'unrolled'}, {real.remat}"
    counts = [(real.norms, real.sums, linears, real.left) for linears in real.linears]

    def fuse(loss: Any, **options: Any) -> Callable[[Any], jax.Array]:
        return with_model(jln.fuse(train.loss_fn, **options))

    with context(config, mesh):
        return judged(f"{real.model} {layers}", with_model(train.loss_fn), parameters, counts, fuse=fuse)


def step_checked(name: str) -> bool:
    """One step of MaxText's trainer, as it sets it up and compiles it."""
    options, more = MESHES[name]
    own = Real("llama2-7b", True, "full").options() | options
    # So much that the parameters' own rounding is not seen, from the first step on.
    sgd = {"opt_type": "sgd", "learning_rate": 64.0, "warmup_steps_fraction": 0.0, "gradient_clipping_threshold": 0.0}
    config = config_of(per_device_batch_size=1, **own, **sgd)
    with contextlib.redirect_stdout(io.StringIO()):
        _, _, shardings, _, mesh, _, data, _, _, _, state = train_utils.setup_train_loop(config, None)
    graph, state = nnx.split(state)
    of_parameters, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    parameters, rest = nnx.split_state(state, nnx.Param, ...)
    parameters, batch = moved(parameters), next(data)

    def step(loss_fn: Callable[..., Any]) -> tuple[list[Any], int, int]:
        """Return what it adds to the parameters, the number of its collectives, and their bytes."""
        with mock.patch.object(train, "loss_fn", loss_fn), context(config, mesh):
            jitted, _ = train_utils.jit_train_and_eval_step(
                config, graph, mesh, state, shardings, train.train_step, params_shardings=of_parameters
            )
            compiled = jitted.lower(state, batch).compile()
            given = jax.tree.map(jnp.copy, nnx.merge_state(parameters, rest))  # the step writes over it
            new = nnx.filter_state(compiled(given, batch)[0], nnx.Param)
        changes = [np.array(a) - b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(parameters), strict=True)]
        collectives = program.collectives(compiled.as_text())
        return changes, sum(c.times for c in collectives), sum(c.times * c.bytes for c in collectives)

    wanted, times, size = step(train.loss_fn)
    are_right = [all(np.abs(change).max() > 0 for change in wanted)]
    for linears, (more_times, more_size) in zip((False, True), more, strict=True):
        changes, own_times, own_size = step(jln.fuse(train.loss_fn, linears=linears))
        largest, is_right = difference(changes, wanted)
        is_right &= own_times <= times + more_times and own_size <= size + more_size
        collectives = f"{own_times} collectives of {own_size} bytes, untouched {times} of {size}"
        verdict = "ok" if is_right else "WRONG"
        print(f"{name}{', linears' * linears}: {collectives}; largest difference {largest:.0e}: {verdict}", flush=True)
        are_right.append(is_right)
    return all(are_right)


# Of which `moved` tells the bytes: four blocks as wide as MaxText has them, of 8 sequences of 1024 tokens.
WIDE = {
    "Llama, scanned, minimal": Real("llama2-7b", True, "minimal", layers=4),
    "Llama, scanned, full": Real("llama2-7b", True, "full", layers=4),
    "Llama, unrolled, full": Real("llama2-7b", False, "full", layers=4),
    "Qwen 3, scanned, full": Real("qwen3-8b", True, "full", layers=4),
    "Gemma 2, scanned, full": Real("gemma2-9b", True, "full", layers=2),
    "Gemma 2, unrolled, full": Real("gemma2-9b", False, "full", layers=2),
}
NO_NORM = mock.patch.object(normalizations.RMSNorm, "__call__", lambda self, x, **_: jnp.asarray(x, self.dtype))


def print_moved(name: str, real: Real) -> None:
    """Print what a step moves on an H200: as it is, fused, fused with Linears, and with its norms left out."""
    config = config_of(
        per_device_batch_size=1, max_target_length=1024, vocab_size=8192, attention="cudnn_flash_jax", dtype="bfloat16",
        hardware="gpu", **real.options(), own_sizes=True,
    )  # fmt: skip
    kinds = (jax.sharding.AxisType.Auto,) * len(config.mesh_axes)
    mesh = program.mesh("h200", (1,) * len(config.mesh_axes), config.mesh_axes, kinds)
    with context(config, mesh):
        _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    nnx.pop(model, nnx.Intermediate)
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = maxtext_utils.get_shaped_batch(config)
    batch = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for name, a in shapes.items()}

    as_it_is, fused = contextlib.nullcontext(), [jln.fuse(train.loss_fn, linears=on) for on in (False, True)]
    ways = [(train.loss_fn, as_it_is), *((function, as_it_is) for function in fused), (train.loss_fn, NO_NORM)]
    moved = []
    for loss_fn, norms in ways:
        with context(config, mesh), cudnn(), using(Gpu(chip_by_name("h200"))), norms:
            found = program.compile_for(
                jax.value_and_grad(loss_of(loss_fn, config, graph)), parameters, rest, batch, chip="h200"
            )
        moved.append((found.bytes_total / 1e9, (found.bytes_total - found.product_bytes) / 1e9, found.temp_bytes / 1e9))
    columns = (" / ".join(f"{row[i]:.2f}" for row in moved) for i in range(3))
    print(f"| {name} | {' | '.join(columns)} |", flush=True)


@contextlib.contextmanager
def cudnn() -> Iterator[None]:
    """Have JAX take cuDNN for there, of which it asks the machine, and the GPU for its compute capability."""
    with (
        mock.patch.object(attention, "check_cudnn_version", lambda: 91002),
        mock.patch.object(attention, "check_compute_capability", lambda least: float(least) <= 9.0),
        mock.patch.object(attention, "is_cuda_compute_capability_equal", lambda given: given == "9.0"),
    ):
        yield


def main() -> None:
    if sys.argv[1:2] == ["moved"]:
        print("| MaxText | moved, GB | outside of products, GB | temporary, GB |\n|---|---|---|---|")
        for name in (name for name in WIDE if not sys.argv[2:] or any(word in name for word in sys.argv[2:])):
            print_moved(name, WIDE[name])
        return
    sys.exit(0 if all([*map(checked, MODELS), *map(step_checked, MESHES)]) else 1)


if __name__ == "__main__":
    main()
