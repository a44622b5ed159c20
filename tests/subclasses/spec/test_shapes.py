"""Shapes in a declaration: the notation, the checks, and their cost in a compiled function."""

import copy
import functools
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import desugar
from subclasses import SpecError, dynamic, inner, static
from subclasses.spec.shapes import Shape, parse_shape
from tests.subclasses.subjects import MODES, declare
from tests.tables import giving, raising

Weight = declare(
    name="Weight",
    __module__=__name__,
    qdata=inner(shape="out in"),
    scale=inner(shape="out 1"),
    keywords={"fallback": "map"},
)


# Every part of the notation; the optional tensors share a name that no required one has.
Full = declare(
    name="Full",
    table=inner(shape="... rows _"),
    first=inner(optional=True, shape="extra"),
    second=inner(optional=True, shape="rows extra"),
    third=inner(optional=True, shape="extra 2 width"),
    mean=inner(shape=""),
    square=inner(optional=True, shape="side side"),
    any=inner(optional=True, shape="..."),
    length=dynamic(default=0),
    width=static(default=3),
)
Counted = declare(name="Counted", values=inner(ndim=2), offsets=inner(shape="length"), length=dynamic())


def weight(out=4, columns=3):
    return Weight(torch.randn(out, columns), torch.rand(out, 1))


# ---- the notation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ndim", "expected"),
    [
        (None, None, None),
        ("out in", None, Shape(("out", "in"), False)),
        ("  out   1 ", None, Shape(("out", 1), False)),
        ("... rows _", None, Shape(("rows", "_"), True)),
        ("...", None, Shape((), True)),
        ("", None, Shape((), False)),
        (None, 2, Shape(("_", "_"), False)),
        (None, 0, Shape((), False)),
    ],
)
def test_the_notation(text, ndim, expected):
    found = parse_shape("Cls.x", text, ndim)
    assert found == expected
    if found is not None:
        assert parse_shape("Cls.x", str(found), None) == found


test_bad_notation_is_refused_at_the_class_statement = raising(
    [
        (
            lambda text=text, ndim=ndim: declare(name="Bad", x=inner(shape=text, ndim=ndim)),
            SpecError,
            rf"^Bad\.x: .*{words}",
        )
        for text, ndim, words in [
            ("out, in", None, "separated by spaces; write shape='out in'"),
            ("out ...", None, "`...` is for leading dims and stands first; write `_`"),
            ("out in-1", None, "'in-1' is none of these"),
            ("out -1", None, "'-1' is none of these"),
            ("*batch out", None, "'\\*batch' is none of these"),
            ("#out", None, "'#out' is none of these"),
            (("out", "in"), None, 'a string such as "out in"'),
            (2, None, "expected shape= to be a string"),
            ("out in", 2, "remove ndim=2"),
            (None, -1, "expected ndim= to be a non-negative int, got -1"),
            (None, True, "expected ndim= to be a non-negative int, got True"),
            (None, 2.0, "expected ndim= to be a non-negative int"),
        ]
    ]
)


def test_the_spec_shows_the_declaration():
    assert repr(Weight.__spec__) == (
        "class Weight(TensorSubclass, size_from='qdata', dtype_from='qdata', fallback='map', decompose=False):\n"
        "    qdata: Tensor = inner(shape='out in')\n"
        "    scale: Tensor = inner(shape='out 1')"
    )
    shown = repr(Full.__spec__)
    assert "    first: Tensor | None = inner(shape='extra', optional=True)\n" in shown
    assert "    mean: Tensor = inner(shape='')\n" in shown
    assert "    width = static(default=3)\n    length = dynamic(default=0)" in shown
    assert "values: Tensor = inner(shape='_ _')" in repr(Counted.__spec__)


# ---- construction ------------------------------------------------------------------------------------------


def full(**given):
    meta = {n: given.pop(n) for n in ("width", "length") if n in given}
    made = {n: torch.zeros(size) for n, size in ({"table": (5, 2, 7), "mean": ()} | given).items()}
    return Full(**dict.fromkeys(Full.__spec__.inner_names) | made, **meta)


# Names that the generated text uses.
ODD = declare(
    name="Odd",
    shape_qdata=inner(shape="a"),
    qdata=inner(shape="a b"),
    check_shapes=inner(shape="b"),
    len=inner(optional=True, shape="a"),
)
CHILD = declare(Weight, name="Child", scale=inner(shape="out in"))


test_a_wrong_shape_names_the_field_and_what_bound_the_name = raising(
    [
        (make, ValueError, words)
        for make, words in [
            (
                lambda: Weight(torch.zeros((4,)), torch.zeros((4, 1))),
                r"Weight\.qdata: expected shape \(out in\), 2 dims, got \(4\)",
            ),
            (
                lambda: Weight(torch.zeros((4, 3, 2)), torch.zeros((4, 1))),
                r"Weight\.qdata: .*2 dims, got \(4, 3, 2\)",
            ),
            (
                lambda: Weight(torch.zeros((4, 3)), torch.zeros((5, 1))),
                r"Weight\.scale: expected shape \(out 1\) with out=4 of 'qdata', got \(5, 1\)",
            ),
            (
                lambda: Weight(torch.zeros((4, 3)), torch.zeros((4, 3))),
                r"Weight\.scale: expected shape \(out 1\), got \(4, 3\)",
            ),
            (lambda: Weight(torch.zeros((4, 3)), torch.zeros(())), r"Weight\.scale: .*2 dims, got \(\)"),
            (
                lambda: Weight(torch.zeros((0, 3)), torch.zeros((1, 1))),
                r"with out=0 of 'qdata', got \(1, 1\)",
            ),
            (
                lambda: full(table=(7,)),
                r"Full\.table: expected shape \(\.\.\. rows _\), at least 2 dims, got \(7\)",
            ),
            (lambda: full(mean=(1,)), r"Full\.mean: expected shape \(\), 0 dims, got \(1\)"),
            (lambda: full(second=(3, 6)), r"Full\.second: .* with rows=2 of 'table', got \(3, 6\)"),
            (
                lambda: full(first=(6,), second=(2, 5)),
                r"Full\.second: .* with extra=6 of 'first', got \(2, 5\)",
            ),
            (lambda: full(first=(6,), third=(5, 2, 3)), r"Full\.third: .* with extra=6 of 'first'"),
            (lambda: full(second=(2, 6), third=(5, 2, 3)), r"Full\.third: .* with extra=6 of 'second'"),
            (
                lambda: full(third=(6, 1, 3)),
                r"Full\.third: expected shape \(extra 2 width\), got \(6, 1, 3\)",
            ),
            (
                lambda: full(third=(6, 2, 3), width=4),
                r"Full\.third: .* with width=4 of metadata, got \(6, 2, 3\)",
            ),
            (lambda: full(square=(3, 2)), r"Full\.square: .* with side=3 of 'square', got \(3, 2\)"),
            (
                lambda: Counted(torch.zeros(2, 3), torch.zeros(5), length=4),
                r"Counted\.offsets: .* with length=4 of metadata, got \(5\)",
            ),
            (
                lambda: Counted(torch.zeros(2), torch.zeros(5), length=5),
                r"Counted\.values: expected shape \(_ _\), 2 dims, got \(2\)",
            ),
            (
                lambda: ODD(*(torch.zeros(size) for size in ((2,), (2, 3), (3,), (3,)))),
                r"Odd\.len: .* with a=2 of 'shape_qdata'",
            ),
            (lambda: CHILD(torch.zeros(2, 3), torch.zeros(2, 1)), r"Child\.scale: .* with in=3 of 'qdata'"),
        ]
    ]
)


test_right_shapes = giving(
    {
        **{
            f"{sizes}": (lambda sizes=sizes: full(**sizes).width, sizes.get("width", 3))
            for sizes in [
                {},
                {"table": (2, 7)},
                {"first": (6,)},
                {"first": (6,), "second": (2, 6), "third": (6, 2, 3)},
                {"second": (2, 6), "third": (6, 2, 3)},
                {"third": (9, 2, 4), "width": 4},
                {"square": (3, 3)},
                {"any": ()},
                {"any": (1, 2, 3)},
            ]
        },
        "no check where none is declared": (lambda: "shape" in declare(qdata=inner()).__source__, False),
        "a check": (lambda: "check_shapes" in Weight.__source__, True),
        "no loop": (lambda: "for " in Weight.__source__.partition("def _wrap")[0], False),
        "of a weight": (lambda: weight().qdata.shape, (4, 3)),
        "no rows": (lambda: weight(0, 0).scale.shape, (0, 1)),
        "of a leaf": (
            lambda: Weight(torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 1)).requires_grad,
            True,
        ),
        "a dynamic int": (lambda: Counted(torch.zeros(2, 3), torch.zeros(5), length=5).length, 5),
        "names that the generated text uses": (
            lambda: ODD(*(torch.zeros(n) for n in ((2,), (2, 3), (3,), (2,)))).check_shapes.shape,
            (3,),
        ),
        "of a child": (lambda: CHILD(torch.zeros(2, 3), torch.zeros(2, 3)).scale.shape, (2, 3)),
        "of a row, unchecked": (lambda: weight()[0].qdata.shape, (3,)),
        "of a transpose, unchecked": (lambda: weight().t().scale.shape, (1, 4)),
    }
)


def test_assigning_is_checked():
    w = weight()
    w.scale = torch.ones(4, 1)
    with pytest.raises(ValueError, match=r"Weight\.scale: .* with out=4 of 'qdata', got \(3, 1\)"):
        w.scale = torch.ones(3, 1)
    assert w.scale.tolist() == [[1.0]] * 4
    with pytest.raises(ValueError, match=r"Weight\.qdata: .* with out=4 of 'scale', got \(5, 3\)"):
        w.qdata = torch.zeros(5, 3, dtype=w.qdata.dtype)


def test_values_that_are_not_constructed_are_not_checked():
    w = weight()
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert torch.equal(other.scale, w.scale)
    names, layout = w.__tensor_flatten__()
    rebuilt = Weight.__tensor_unflatten__(dict.fromkeys(names, torch.zeros(3)), layout, None, None)
    assert rebuilt.scale.shape == (3,)


# ---- under a compiler --------------------------------------------------------------------------------------


def doubled(qdata, scale):
    return Weight(qdata * 2, scale) * 2


@pytest.mark.parametrize("door", ["stock", "desugar", "counting"])
def test_sizes_stay_symbolic_and_the_graph_whole(door):
    counter = CompileCounter()
    doors = {**MODES, "counting": functools.partial(torch.compile, backend=counter)}
    fn = doors[door](doubled, dynamic=True, fullgraph=True)
    for out, columns in ((4, 3), (5, 6), (7, 8)):
        y = fn(torch.ones(out, columns), torch.ones(out, 1))
        assert y.qdata.tolist() == [[4.0] * columns] * out and y.scale.shape == (out, 1)
    assert door != "counting" or counter.frame_count == 1
    with pytest.raises(Exception, match=r"Weight\.scale: expected shape \(out 1\)"):
        fn(torch.ones(4, 3), torch.ones(3, 1))


@pytest.mark.parametrize("mode", ["stock", "desugar"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_that_depends_on_data_is_no_error(mode):
    def fn(mask, row):
        kept, other = mask.nonzero(), (mask * 2).nonzero()
        return Weight(kept.float() * row, other.float()).qdata * 2

    mask, row = torch.tensor([1, 0, 1]), torch.ones(1, 3)
    assert torch.equal(MODES[mode](fn)(mask, row), fn(mask, row))


def test_export_keeps_a_dim_dynamic():
    class Module(torch.nn.Module):
        def forward(self, qdata, scale):
            return Weight(qdata, scale).qdata + 1

    out = torch.export.Dim("out")
    program = torch.export.export(
        Module(),
        (torch.ones(4, 3), torch.ones(4, 1)),
        dynamic_shapes=({0: out}, {0: out}),
    )
    assert torch.equal(program.module()(torch.ones(6, 3), torch.ones(6, 1)), torch.full((6, 3), 2.0))


def test_a_compiled_call_checks_nothing_again():
    """The trace has compared the sizes; a wrapper makes the value of constants, without the constructor."""
    twice = desugar.compile(
        lambda x: Weight(x.unwrap("qdata") * 2, x.unwrap("scale")), backend="eager", dynamic=True
    )
    twice(Weight(torch.ones(3, 4), torch.ones(3, 1)))
    (program,) = twice.programs
    assert "check_shapes" in Weight.__source__ and "make_wrapper_subclass" in program.source
    assert not any(word in program.source for word in ("check_shapes", "ndim", "shape", "Weight("))
    assert twice(Weight(torch.ones(5, 4), torch.ones(5, 1))).shape == (5, 4) and len(twice.programs) == 1
