"""Programs rewritten, those inside of their equations too: bodies of loops, branches, checkpoints and shard_maps.

A body is rewritten by itself, with the arguments and results that it has. What is not known stays as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from jln import _routes
from jln._fuse.calls import Options
from jln._fuse.graph import Graph, Node, bind
from jln._fuse.rewriting import Finding, rewrite

Arrays = Sequence[Any]
CHECKPOINTS = ("checkpoint", "remat2", "remat")
WITH_BODIES = ("scan", "while", "cond", "jit", "pjit", "closed_call", "core_call")


def evaluate(program: ClosedJaxpr, arrays: Arrays, options: Options, findings: list[Finding]) -> list[Any]:
    """The program's results, with operators in the place of its norms. findings: where its own are added."""
    graph = Graph(program)
    own = rewrite(graph, options) if _is_of_known_shapes(program.jaxpr) else []
    findings += own
    left = {f.node.position: f for f in own if f.operator is None}
    shared: dict[Any, Any] = {}

    def results_of(node: Node, operands: Arrays) -> Arrays:
        if node.equation is None:
            if node.remark is not None:
                _note(node.remark, operands[0])
            with _author_context(node.outputs[0].maker):
                return node.call(*operands) if node.call is not None else []
        if node.position in left:
            _note(left.pop(node.position))
        with _author_context(node):
            return _bind(node.equation, operands, options, findings, shared)

    results = graph.run(dict(zip(graph.inputs, arrays, strict=True)), results_of)
    for finding in left.values():  # of which nothing runs
        _note(finding)
    return results


def _note(finding: Finding, read: Any = None) -> None:
    """Note an operator, or a norm that stays as it was, at the model's line. read: what the operator reads."""
    if (operator := finding.operator) is None:
        route = f"norm of {finding.x.aval.str_short()}", "plain", finding.why
    else:
        path = "fused" if operator.endswith("_linear") else "norm"
        route = f"jln.{operator}", path, "; ".join(filter(None, (", ".join(finding.operands), finding.why)))
    with _author_context(finding.node):
        _routes.note(*route, read)


def _is_of_known_shapes(jaxpr: Jaxpr) -> bool:
    """False for a program with symbolic shapes, which stays as it is."""
    avals = [v.aval for v in (*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))]
    return all(isinstance(n, int) for a in avals for n in getattr(a, "shape", ()))


@contextlib.contextmanager
def _author_context(node: Node | None):
    """Have what is traced know the author's place in the code, the name scopes around it and its context."""
    if node is None:
        yield
        return
    # A jit of a framework's has the lines of its first call inside, whoever calls it.
    is_foreign = lambda jit: _routes.is_of_framework(jit.params["jaxpr"].jaxpr.debug_info.func_filename or "")  # noqa: E731
    traceback = next(filter(is_foreign, node.within), node.equation).source_info.traceback
    names = source_info_util.current_name_stack()
    for jit in node.within:
        names = (names + jit.source_info.name_stack).extend(f"jit({jit.params['name']})")
    names += node.equation.source_info.name_stack
    with source_info_util.user_context(traceback, name_stack=names), node.equation.ctx.manager:
        yield


def _bind(equation: Any, operands: Arrays, options: Options, findings: list[Finding], shared: dict[Any, Any]) -> Arrays:
    """The results of an equation, its bodies rewritten where they have norms. shared: checkpoints of several layers."""
    primitive, params = equation.primitive, equation.params
    # One that is differentiated stays: it is what backward makes again, which `jax.checkpoint` would not say of it.
    if primitive.name in CHECKPOINTS and isinstance(params.get("jaxpr"), Jaxpr) and not params.get("differentiated"):
        policy, prevent_cse = params["policy"], params["prevent_cse"]
        key = id(params["jaxpr"]), id(policy), prevent_cse
        if key not in shared:
            body = ClosedJaxpr(params["jaxpr"], ())
            options = options._replace(is_checkpointed=True, policy=policy)
            function = lambda *arrays: evaluate(body, arrays, options, findings)  # noqa: E731
            shared[key] = jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)
        return shared[key](*operands)
    if primitive.name == "shard_map":
        return _shard(params, operands, options, findings)
    if primitive.name in WITH_BODIES:
        options = options._replace(is_scanned=options.is_scanned or primitive.name == "scan")
        params = {n: _rewrite_in(p, options, findings) for n, p in params.items()}
    return bind(equation, operands, params)


def _shard(params: dict[str, Any], operands: Arrays, options: Options, findings: list[Finding]) -> Arrays:
    body = ClosedJaxpr(params["jaxpr"], ())
    axes = set(params.get("newly_manual_axes") or params["manual_axes"])
    specs = {name: tuple(params[name]) for name in ("in_specs", "out_specs")}
    function = lambda *arrays: tuple(evaluate(body, arrays, options, findings))  # noqa: E731
    own = jax.shard_map(function, mesh=params["mesh"], **specs, axis_names=axes, check_vma=params["check_vma"])
    return own(*operands)


def _rewrite_in(param: Any, options: Options, findings: list[Finding]) -> Any:
    """An equation's parameter, with the bodies in it rewritten."""
    if isinstance(param, ClosedJaxpr):
        return _rewrite(param, options, findings)
    if isinstance(param, tuple) and any(isinstance(p, ClosedJaxpr) for p in param):
        return tuple(_rewrite_in(p, options, findings) for p in param)
    return param


def _rewrite(body: ClosedJaxpr, options: Options, findings: list[Finding]) -> ClosedJaxpr:
    """The body with operators in it; as it was where it has no norm."""
    own: list[Finding] = []

    def same(*arrays: Any) -> list[Any]:
        results = evaluate(body, arrays, options, own)
        return [_as(v, a) for v, a in zip(body.out_avals, results, strict=True)]

    rewritten = jax.make_jaxpr(same)(*body.in_avals)
    findings += own
    return rewritten if any(f.operator is not None or _routes.listen.value is not None for f in own) else body


def _as(aval: Any, array: Any) -> Any:
    """The array in the dtype of what it stands for; as it is, and weak if it is, where it has that."""
    is_same = not hasattr(aval, "dtype") or jax.typeof(array).dtype == aval.dtype
    return array if is_same else jnp.asarray(array, aval.dtype)
