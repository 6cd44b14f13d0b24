"""Print what policies of `jax.checkpoint` make again and hold, in four layers of Llama's step.

    python benchmarks/checkpoint_policies.py
    python benchmarks/checkpoint_policies.py nothing STATISTICS   # with one of these words in their names

The step is compiled for an H200 that need not be there, with `jln.add_rms_norm_linear`, in plain jnp and with Flax's
layers.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

import jln
from jln import program
from losses import losses
from stacks import STACKS, Stack

LAYERS = 4
ours, jaxs = jln.checkpoint_policies, jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "no checkpoint": None,
    "nothing_saveable": jaxs.nothing_saveable,
    "save_only_these_names(jln.STATISTICS)": jaxs.save_only_these_names(jln.STATISTICS),
    "dots_with_no_batch_dims_saveable": jaxs.dots_with_no_batch_dims_saveable,
    "jln's dots_with_no_batch_dims_and_statistics_saveable": ours.dots_with_no_batch_dims_and_statistics_saveable,
    "jln's offload_dots_with_no_batch_dims": ours.offload_dots_with_no_batch_dims("device", "pinned_host"),
}
VARIANTS = {"jln": "jln, add_norm_linear", "jnp": "jnp", "Flax": "flax"}


@dataclasses.dataclass(frozen=True)
class Checkpointed(Stack):
    """A stack whose blocks are checkpointed by a policy that has no name in JAX."""

    chosen: Any = None

    def checkpointed(self, wrap: Callable[..., Any], block: Any) -> Any:
        return wrap(block, policy=self.chosen)


def compiled(stack: Stack, variant: str) -> program.CompiledProgram:
    step = stack.step(losses(stack)[variant])
    return program.compile_for(step, stack.parameters(), stack.x())


def row(name: str, stack: Stack) -> str:
    cells = []
    for who, variant in VARIANTS.items():
        found = compiled(stack, variant)
        products = sum(k.times for k in found.kernels if k.product and not k.kind.startswith("__cudnn$fmha"))
        norms = [str(sum(k.times for k in found.kernels if k.is_triton))] if who == "jln" else []
        cells += [f"{products}", *norms, f"{found.bytes_total / 1e9:.1f}", f"{found.temp_bytes / 1e9:.2f}"]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what policies of jax.checkpoint make again and hold.")
    parser.add_argument("words", nargs="*", help="only policies whose names have one of these")
    words = parser.parse_args().words
    chosen = {name: policy for name, policy in POLICIES.items() if not words or any(word in name for word in words)}
    if not chosen:
        parser.error(f"no policy's name has any of these words; known are {'; '.join(POLICIES)}")
    stack = dataclasses.replace(STACKS["stack-llama-q-k-v"], layers=LAYERS)
    named: dict[str, Any] = {f.name: getattr(stack, f.name) for f in dataclasses.fields(stack)}
    heads = ("products", "norm kernels", "all, GB", "temporary, GB")
    titles = [f"{who}: {what}" for who in VARIANTS for what in heads if who == "jln" or what != "norm kernels"]
    print("|", " | ".join(["policy", *titles]), "|")
    print("|---" * (1 + len(titles)) + "|")
    for name, policy in chosen.items():
        checkpointed = Checkpointed(**(named | {"policy": "chosen", "chosen": policy}))
        print(row(name, checkpointed if policy else stack), flush=True)


if __name__ == "__main__":
    main()
