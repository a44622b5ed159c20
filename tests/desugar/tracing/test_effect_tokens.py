"""Ops with an effect besides their result: kept in the graph, in order, where the partitioner cannot drop them."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import desugar
from desugar import DesugarError
from tests.desugar.classes import Pair
from tests.desugar.judge import by_dynamo, by_pass, judge


def regular(grad=False, dtype=torch.float64):
    x = torch.arange(9.0, dtype=dtype).reshape(3, 3) / 10
    return (x @ x.T + torch.eye(3, dtype=dtype)).requires_grad_(grad)


def singular(grad=False):
    return torch.zeros(3, 3, dtype=torch.float64).requires_grad_(grad)


CHECKED = {
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x * 2),
    "cholesky": torch.linalg.cholesky,
    "lu_factor": lambda x: torch.linalg.lu_factor(x)[0],
    "tensorinv": lambda x: torch.linalg.tensorinv(x.unsqueeze(1), ind=2),
    "two": lambda x: torch.linalg.inv(x) + torch.linalg.cholesky(x * 2),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", [by_pass, by_dynamo])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", CHECKED.values(), ids=CHECKED)
def test_linear_algebra_that_checks(fn, grad, way):
    judge(fn, lambda: (regular(grad),), way=way, calls=2)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", CHECKED.values(), ids=CHECKED)
def test_its_errors_are_eagers(fn, grad):
    compiled = by_pass(fn)
    compiled(regular(grad))
    with pytest.raises(RuntimeError) as wanted:
        fn(singular(grad))
    with pytest.raises(type(wanted.value)) as got:
        compiled(singular(grad))
    assert str(got.value) == str(wanted.value)
    assert len(compiled.programs) == 1


def test_an_argument_is_not_written_when_the_check_fails():
    compiled, x = by_pass(lambda x: torch.linalg.inv(x.add_(0))), singular()
    compiled(regular())
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(x)
    assert torch.equal(x, singular())


def test_on_a_subclass():
    judge(lambda x: torch.linalg.inv(x) * 2, lambda: (Pair(regular(), regular() * 2).requires_grad_(),))


def test_a_check_whose_result_nobody_uses():
    def fn(x):
        torch.linalg.cholesky(x)
        return x * 2

    compiled = by_pass(fn)
    compiled(regular())
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(-regular())


@pytest.mark.slow
def test_through_inductor():
    compiled = desugar.compile(lambda x: torch.linalg.solve(x, x * 2) + torch.linalg.inv(x))
    judge(compiled.__wrapped__, lambda: (regular(True),), compiled)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(singular(True))


def test_in_a_backward_it_is_refused():
    x = regular(True)
    with pytest.raises(DesugarError, match="backward calls an op with a side effect") as caught:
        by_pass(lambda x: torch.linalg.eigvals(x).abs(), strict=True)(x)
    assert __file__ in str(caught.value)
    judge(lambda x: torch.linalg.eigvals(x).abs(), lambda: (regular(True),))


seen: list[str] = []


@torch.library.custom_op("desugar_tests::tell", mutates_args=())
def tell(x: torch.Tensor, what: str) -> torch.Tensor:
    seen.append(what)
    return x.clone()


tell.register_fake(lambda x, what: torch.empty_like(x))


@pytest.fixture
def ordered():
    _register_effectful_op(torch.ops.desugar_tests.tell.default, _EffectType.ORDERED)
    yield
    _register_effectful_op(torch.ops.desugar_tests.tell.default, None)


def test_custom_ops_keep_their_order(ordered):
    compiled = by_pass(lambda x: (tell(x, "first"), tell(x * 2, "second") + 1)[1])
    for _ in range(2):
        seen.clear()
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
        assert seen == ["first", "second"]
