"""The rules that every L0 program keeps, one function a rule. Run after tracing and after each pass over L0."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilewright.tile import dtypes
from tilewright.tile.errors import VerifyError
from tilewright.tile.ir import tile_ir as ir


def verify(program: ir.Program) -> None:
    """Raises `VerifyError` at the first rule that is broken."""
    for node in reachable(program):
        for rule in RULES:
            problem = rule(program, node)
            if problem:
                raise VerifyError(f"{node.op}: {problem}", node.line)


def reachable(program: ir.Program) -> Iterator[ir.Node]:
    """Every node that an effect needs, operands first."""
    seen: set[ir.Node] = set()
    for effect in program.effects():
        for node in ir.operands_first(effect, seen.__contains__):
            seen.add(node)
            yield node


def known_op(program: ir.Program, node: ir.Node) -> str:
    return "" if node.op in ir.PURE or node.op in ir.EFFECTS else "no such op"


def shapes_agree(program: ir.Program, node: ir.Node) -> str:
    if node.op in ("binary", "where", "fma", "unary", "cast", "bitcast", "random"):
        shape = ir.broadcast_shapes(*(a.shape for a in node.args))
        if shape != node.shape:
            return f"operands of shapes {[a.shape for a in node.args]} give {shape}, not {node.shape}"
    if node.op == "reshape":
        if any(isinstance(a, ir.Dim) for a in (*node.shape, *node.args[0].shape)):
            return "regroups an axis of run-time size"
        if ir.elements(node.shape) != ir.elements(node.args[0].shape):
            return "another number of elements"
    return ""


def dtypes_agree(program: ir.Program, node: ir.Node) -> str:
    if node.op == "binary":
        left, right = node.args
        if left.dtype != right.dtype or node.dtype != ir.result_dtype(node.attrs["kind"], left.dtype):
            return f"{left.dtype} and {right.dtype} give {node.dtype}"
    if node.op == "where" and not (
        node.args[0].dtype == dtypes.boolean and node.args[1].dtype == node.args[2].dtype == node.dtype
    ):
        return f"chooses between {node.args[1].dtype} and {node.args[2].dtype} by {node.args[0].dtype}"
    if node.op == "store" and node.args[-1].dtype != program.views[node.attrs["view"]].dtype:
        return f"a value of {node.args[-1].dtype} into a view of {program.views[node.attrs['view']].dtype}"
    return ""


def kinds_exist(program: ir.Program, node: ir.Node) -> str:
    table = {"binary": ir.BINARY, "unary": ir.UNARY}.get(node.op)
    if table is not None and node.attrs["kind"] not in table:
        return f"no kind {node.attrs['kind']}"
    if "accuracy" in node.attrs and node.attrs["kind"] not in ir.ROUNDED:
        return f"{node.attrs['kind']} has one accuracy"
    if node.op == "reduce":
        if node.attrs["combine"] not in ir.COMBINES:
            return f"no combine {node.attrs['combine']}"
        if not 0 <= node.attrs["axis"] < len(node.args[0].shape):
            return f"no axis {node.attrs['axis']}"
    return ""


def regions_hold(program: ir.Program, node: ir.Node) -> str:
    """No use across a closed region: what a node uses lives where the node lives or further out."""
    for arg in (*node.args, *node.limits):
        if not node.region.within(arg.region):
            return f"uses %{arg.id} of another region, made at {arg.line}"
    return ""


def bounds_are_scalars(program: ir.Program, node: ir.Node) -> str:
    wanted = node.args if node.op == "loop" else node.limits
    if any(a.shape or a.dtype != dtypes.int64 for a in wanted):
        return "a bound is no int64 scalar"
    if node.op in ("when", "check") and (node.args[0].shape or node.args[0].dtype != dtypes.boolean):
        return "the condition is no bool scalar"
    return ""


def index_has_rank(program: ir.Program, node: ir.Node) -> str:
    if node.op not in ("load", "store"):
        return ""
    view = program.views.get(node.attrs["view"])
    if view is None:
        return f"no view {node.attrs['view']}"
    extra = node.attrs["masked"] + (node.op == "store")
    if len(node.args) - extra != view.rank:
        return f"{len(node.args) - extra} indices for {view.rank} axes"
    if any(a.dtype != dtypes.int64 for a in node.args[: view.rank]):
        return "an index is not int64"
    return ""


def sets_match(program: ir.Program, node: ir.Node) -> str:
    """Each get and set names a cell that is declared before it, further out or in the same region."""
    if node.op not in ("get", "set"):
        return ""
    cell = program.nodes[node.attrs["var"]]
    if cell.op != "var" or cell.id > node.id or not node.region.within(cell.region):
        return "no such cell here"
    value = node.args[0] if node.op == "set" else node
    if value.dtype != cell.dtype or ir.broadcast_shapes(value.shape, cell.shape) != cell.shape:
        return f"a cell of {cell.dtype}{list(cell.shape)} meets {value.dtype}{list(value.shape)}"
    return ""


def requests_exist(program: ir.Program, node: ir.Node) -> str:
    if node.op == "stage" and (node.attrs["scope"] not in ir.SCOPES or node.shape != node.args[0].shape):
        return f"no such request: {node.attrs['scope']}{ir.shape_text(node.shape)}"
    order = node.attrs.get("order", range(len(node.shape)))
    return "" if sorted(order) == [*range(len(node.shape))] else f"no order of {len(node.shape)} axes: {order}"


RULES: tuple[Callable[[ir.Program, ir.Node], str], ...] = (
    known_op, shapes_agree, dtypes_agree, kinds_exist, regions_hold, bounds_are_scalars, index_has_rank, sets_match,
    requests_exist,
)  # fmt: skip
