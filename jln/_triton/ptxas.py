"""The assembler, ptxas, that jaxlib runs on a kernel's PTX where the kernel is launched first."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess

from jaxlib import gpu_triton

from jln._triton.chip import Chip

TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
LEAST, FAULTY = (11, 8, 0), (12, 3, 103)  # jaxlib passes by older ones, and by this one


def find() -> str | None:
    """The path of the assembler that jaxlib takes; None where it finds none, or has no CUDA plugin.

    It is the first of these places, in the order of XLA's `FindCudaExecutable`: PATH is before the plugin's own.
    """
    if gpu_triton._cuda_triton is None:
        return None
    return _first(os.environ.get("PATH", ""), str(gpu_triton._cuda_triton.__file__))


@functools.cache
def _first(path: str, library: str) -> str | None:
    """The path of the assembler for this PATH and this library of jaxlib's plugin. jaxlib, too, looks once."""
    plugin = pathlib.Path(library).parent
    nvcc = "nvidia/cu13" if "cuda13" in plugin.name else "nvidia/cuda_nvcc"
    beside = [plugin / up for up in (f"../{nvcc}", f"../../{nvcc}", "cuda", "../../../..", "../../../../..")]
    folders = ["bin", *path.split(os.pathsep)]
    for folder in (*folders, *(f"{root}/bin" for root in (*TOOLKITS, *beside))):
        program = os.path.abspath(os.path.join(folder, "ptxas"))
        version = _version(program)
        if version is not None and version >= LEAST and version != FAULTY:
            return program
    return None


def missing(chip: Chip) -> str | None:
    """The reason why jaxlib cannot make machine code of kernels for an NVIDIA chip; None where it can."""
    if (assembler := find()) is None:
        return "jaxlib finds no ptxas, which assembles kernels, on PATH, in /usr/local/cuda or beside its CUDA plugin"
    refusal = None if chip.ptx_version is None else _refusal(assembler, chip.capability, chip.ptx_version)
    return refusal and f"{assembler}, the first ptxas that jaxlib finds, takes no kernels for {chip}: {refusal}"


def _version(path: str) -> tuple[int, ...] | None:
    """The version that a program says it is; None of what is no ptxas."""
    said = _run([path, "--version"])
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", said.stdout)
    return tuple(map(int, match.groups())) if match and said.returncode == 0 else None


@functools.cache
def _refusal(path: str, capability: int, ptx_version: int) -> str | None:
    """The complaint of a ptxas about an empty program in this PTX for this chip; None where it takes the program."""
    target = f"sm_{capability}{'a' if capability >= 90 else ''}"
    program = f".version {ptx_version / 10}\n.target {target}\n.address_size 64\n"
    made = _run([path, f"--gpu-name={target}", "-o", os.devnull, "-"], program)
    return None if made.returncode == 0 else re.sub(r".*fatal\s*:\s*", "", made.stderr.strip().partition("\n")[0])


def _run(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that may be anything, or nothing."""
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
