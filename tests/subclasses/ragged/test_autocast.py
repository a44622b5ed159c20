"""Rules under autocast: results have the dtype, and about the precision, that dense tensors give."""

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import desugar
from subclasses.ragged import JaggedTensor, autocast
from subclasses.rules.registry import collect_function_rules
from tests.doors import DOORS
from tests.subclasses.ragged.judge import KINDS, kinds
from tests.tables import giving, raising

LENGTHS, WIDTH = (5, 3, 4), 4
ON_CPU, ELSEWHERE = torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA


def rows_of(dtype, features=WIDTH):
    torch.manual_seed(0)
    return [(torch.rand(n, features) * 0.8 + 0.1).to(dtype) for n in LENGTHS]


def weight(*size):
    torch.manual_seed(1)
    return torch.rand(*size) * 0.8 + 0.1


def heads(x):
    return x.unflatten(-1, (2, 2)).transpose(1, 2)


# ---- all functions with rules ----------------------------------------------------------------------------------

# How functions are called; those are compared that dense tensors of the same size accept.
CALLS = (
    lambda f, x: f(x),
    lambda f, x: f(x, x),
    lambda f, x: f(x, x, x),
    lambda f, x: f(x, x.float(), x),
    lambda f, x: f(x, x.select(-1, 0), x),
    lambda f, x: f(x, x, x.select(-1, 0)),
    lambda f, x: f(heads(x), heads(x.float()), heads(x)),
    lambda f, x: f([x, x]),
    lambda f, x: f([x, x.float()], 1),
    lambda f, x: f(x, -1),
    lambda f, x: f(x, 1),
    lambda f, x: f(x, [0, 1]),
    lambda f, x: f(x, 0.5),
    lambda f, x: f(x, 0.5, -1),
    lambda f, x: f(x, 0.5, 1),
    lambda f, x: f(x, 1, -1),
    lambda f, x: f(x, 2, 1),
    lambda f, x: f(x, 0.1, 0.9),
    lambda f, x: f(x, (4,)),
    lambda f, x: f(x, weight(4)),
    lambda f, x: f(x, weight(4, 4)),
    lambda f, x: f(x, weight(4, 4), weight(4)),
    lambda f, x: f(x, weight(3, 4, 4)),
    lambda f, x: f(x, x, weight(2, 4, 4)),
    lambda f, x: f(weight(3, 1, 4), x, weight(3, 4, 4)),
    lambda f, x: f(weight(4), x.flatten(0, 1), weight(4, 4)),
    lambda f, x: f(x.flatten(0, 1), weight(4, 4)),
    lambda f, x: f("bti,io->bto", x, weight(4, 4)),
    lambda f, x: f(x.transpose(1, 2)),
    lambda f, x: f(x.transpose(1, 2), 2),
    lambda f, x: f(x.transpose(1, 2), 3),
    lambda f, x: f(x.transpose(1, 2), 2, weight(4), weight(4)),
    lambda f, x: f(x.transpose(1, 2), weight(4), weight(4)),
    lambda f, x: f(x.transpose(1, 2), weight(4, 4, 1)),
    lambda f, x: f(x.transpose(1, 2), x.select(2, 0).to(torch.int64)),
    lambda f, x: f(x.flatten(0, 1), x.flatten(0, 1).select(1, 0).to(torch.int64)),
    lambda f, x: f(x.flatten(0, 1), x.flatten(0, 1), x.flatten(0, 1).select(1, 0)),
    lambda f, x: f(x.select(-1, 0).to(torch.int64), weight(7, 4)),
    lambda f, x: f(
        x.transpose(0, 1),
        torch.ones(3, 1).long(),
        x.row_lengths() if type(x) is not Tensor else torch.full((3,), 5),
        torch.ones(3).long(),
    ),
)


def functions():
    """The Python-level functions with rules, by name."""
    found = {}
    for f in collect_function_rules(JaggedTensor):
        if not isinstance(f, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            found.setdefault(getattr(f, "__name__", str(f)), []).append(f)
    return found


def names_of_kernels(key):
    """The names of the aten ops with an autocast kernel."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    ops = [op for op in torch._C._dispatch_get_all_op_names() if op.startswith("aten::")]
    return {op.split("::")[1].split(".")[0] for op in ops if has_kernel(op, key.name)}


FUNCTIONS = functions()
CAST = sorted({*FUNCTIONS} & (names_of_kernels(ON_CPU) | {"cross_entropy", *autocast.NAMES}))


def dtypes_of(result):
    return [t.dtype for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


def result_of(call, f, x):
    """Returns the result of a call; None where it is refused. An error about dtypes of rows is raised."""
    try:
        return call(f, x)
    except Exception as error:
        if type(x) is not Tensor and re.search("scalar type|dtype", str(error)):
            raise
        return None


def compare(f, dtype, to):
    """Raises unless all calls that dense tensors accept give their dtypes; returns the number of calls."""
    seen = 0
    for (number, call), kind in itertools.product(enumerate(CALLS), KINDS):
        with torch.autocast("cpu", to):
            want = result_of(call, f, (torch.rand(3, 5, WIDTH) * 0.8 + 0.1).to(dtype))
            got = None if want is None else result_of(call, f, KINDS[kind](rows_of(dtype)))
        if got is not None:
            assert dtypes_of(got) == dtypes_of(want), f"{kind}, call {number}"
            seen += 1
    return seen


def check(name, to):
    for f in FUNCTIONS[name]:
        seen = sum(compare(f, dtype, to) for dtype in (torch.float32, to))
        assert seen or name not in CAST, f"no call of {name} was compared"


@pytest.mark.filterwarnings("ignore")  # of sizes that broadcast, and the like
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sweep(60)
@pytest.mark.parametrize("name", CAST)
def test_functions_that_autocast_knows(name, to):
    check(name, to)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep(744)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {*CAST}))
def test_other_functions(name, to):
    check(name, to)


# ---- the table -------------------------------------------------------------------------------------------------


def names_in_header(policy):
    """The names of the ops that autocast treats alike on devices other than the CPU, as PyTorch's header lists them."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    (listed,) = re.findall(rf"#define AT_FORALL_{policy}\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    return set(re.findall(r"\((\w+)", listed))


def test_the_table_is_that_of_pytorch():
    on_cpu, elsewhere = names_of_kernels(ON_CPU), names_of_kernels(ELSEWHERE)
    wide = names_in_header("FP32") | names_in_header("FP32_SET_OPT_DTYPE")
    lower = names_in_header("LOWER_PRECISION_FP")
    for listed, known in (
        (autocast.LOWER - {"flex_attention"}, on_cpu & lower),
        (autocast.WIDE, on_cpu & wide),
        (autocast.WIDE_ON_CPU, on_cpu - elsewhere),
        (autocast.WIDE_ELSEWHERE, wide - on_cpu),
    ):
        assert listed <= known
    assert not autocast.UNCHANGED & (on_cpu | elsewhere)
    keys = {torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA}
    assert keys <= {*torch.ops.higher_order.flex_attention.py_kernels}  # which cast to a lower precision


test_a_given_dtype_is_that_of_the_sum = giving(
    {
        "none": (lambda: autocast._target_dtype("sum", "cuda", {}), torch.float32),
        "a given one": (lambda: autocast._target_dtype("sum", "cuda", {"dtype": torch.float16}), None),
        "on the CPU": (lambda: autocast._target_dtype("sum", "cpu", {}), None),
    }
)


# ---- values ----------------------------------------------------------------------------------------------------


@kinds
def test_precision(kind):
    """Pools are as precise as without autocast, norms scale before they round, and double precision stays."""
    x, half, double = (KINDS[kind](rows_of(t)) for t in (torch.float32, torch.bfloat16, torch.float64))
    x, half, w = x.transpose(1, 2), half.transpose(1, 2), weight(4)
    exact = F.adaptive_avg_pool1d(x, 2)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(F.adaptive_avg_pool1d(x, 2), exact)
        assert F.scaled_dot_product_attention(*[heads(double)] * 3).dtype is torch.float64
    for y in (F.group_norm(half, 2, w, w), F.batch_norm(half, w, w, w, w)):
        assert y.dtype is torch.bfloat16  # of entries in half precision beside parameters in float32


def of_several_dtypes(kind):
    x, y = (heads(KINDS[kind](rows_of(dtype))) for dtype in (torch.float32, torch.bfloat16))
    return F.scaled_dot_product_attention(x, x, y)


test_operands_of_several_dtypes_are_refused_without_autocast = raising(
    {
        kind: (
            lambda kind=kind: of_several_dtypes(kind),
            ValueError,
            r"of one dtype, got torch\.float32, torch\.float32, torch\.bfloat16",
        )
        for kind in KINDS
    }
)


# ---- ways to compile -------------------------------------------------------------------------------------------

EXAMPLES = {
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(heads(x), heads(x.float()), heads(x @ w)),
        torch.bfloat16,
    ),
    "attention, with a mask": (
        lambda x, w: F.scaled_dot_product_attention(*[heads(x @ w)] * 3, attn_mask=weight(*[x.shape[1]] * 2)),
        torch.bfloat16,
    ),
    "addmm": (lambda x, w: torch.addmm(w[0], x.flatten(0, 1), w), torch.bfloat16),
    "baddbmm": (lambda x, w: torch.baddbmm(w[:1], x, w.expand(3, -1, -1), beta=0.5), torch.bfloat16),
    "vecdot": (lambda x, w: torch.linalg.vecdot(x, x @ w), torch.bfloat16),
    "triplet": (lambda x, w: F.triplet_margin_loss(x @ w, x @ w, x), torch.float32),
    "quantile": (lambda x, w: torch.quantile(x @ w, 0.3, 1), torch.float32),
}


@pytest.mark.parametrize("is_inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", ["jagged", "padded"])
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.sweep(224)
def test_every_door(name, kind, door, is_inside):
    run, dtype = EXAMPLES[name]
    leaves = [*(row.requires_grad_() for row in rows_of(torch.float32)), weight(4, 4).requires_grad_()]

    def inside(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return run(x, w)

    results = []
    for f in (inside, DOORS[door](inside if is_inside else run)):
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_inside):
            out = f(KINDS[kind](leaves[:-1]), leaves[-1])
        assert out.dtype is dtype
        total = out.float().sum()
        results.append([total, *torch.autograd.grad(total, leaves)])
    assert all(g.dtype is torch.float32 for g in results[1])
    torch.testing.assert_close(*results, atol=0.1, rtol=0.05)
    # A call without autocast has its own program.
    assert DOORS[door](run)(KINDS[kind](leaves[:-1]), leaves[-1]).dtype is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("compile", [torch.compile, desugar.compile], ids=["stock", "direct"])
def test_a_layer_by_kernels(compile):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    compiled = compile(layer)
    x = KINDS["jagged"](rows_of(torch.float32, 8))
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(x)
    assert out.dtype is layer(x).dtype is torch.float32
    out.sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in layer.parameters())
