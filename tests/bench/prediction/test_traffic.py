import torch

from bench.prediction.traffic import count_call, nbytes

aten = torch.ops.aten


def counted(func, *args, **kwargs):
    return count_call(func, args, kwargs, func(*args, **kwargs))


def test_a_product_reads_both_operands_and_writes_its_result():
    a, b = torch.randn(4, 8), torch.randn(8, 16)
    found = counted(aten.mm.default, a, b)
    assert found.reads == {torch.float32: 4 * (4 * 8 + 8 * 16)}
    assert found.writes == {torch.float32: 4 * 4 * 16}
    assert found.flops == 2 * 4 * 8 * 16


def test_an_out_argument_is_written_and_not_read():
    a, b, out = torch.randn(4, 8), torch.randn(8, 16), torch.empty(4, 16)
    assert counted(aten.mm.out, a, b, out=out) == count_call(aten.mm.out, (a, b), {"out": out}, out)
    assert counted(aten.mm.out, a, b, out=out).reads == {torch.float32: 4 * (4 * 8 + 8 * 16)}


def test_an_in_place_op_reads_what_it_writes():
    x = torch.randn(10)
    found = counted(aten.add_.Tensor, x, torch.randn(10))
    assert (found.reads, found.writes) == ({torch.float32: 80}, {torch.float32: 40})


def test_an_expanded_operand_is_read_once():
    x = torch.randn(1, 8).expand(100, 8)
    assert nbytes(x) == 32
    assert counted(aten.mul.Tensor, x, torch.randn(100, 8)).reads == {torch.float32: 32 + 3200}


def test_an_embedding_reads_the_rows_that_it_takes():
    found = counted(aten.embedding.default, torch.randn(1000, 16), torch.arange(3))
    assert found.reads == {torch.float32: 3 * 16 * 4, torch.int64: 24}


def test_an_operand_twice_is_read_once():
    x = torch.randn(10)
    assert counted(aten.mul.Tensor, x, x).reads == {torch.float32: 40}


def test_integers_are_multiplied_as_often_as_floats():
    a = torch.ones(32, 8, dtype=torch.int8)
    assert counted(aten._int_mm.default, a, a.t()).flops == 2 * 32 * 8 * 32
