"""Parameters of trainable classes, trained beside their inner tensors as separate parameters: the same numbers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import desugar
from subclasses import DispatchError, SpecError, TensorSubclass, arithmetic, inner, static
from subclasses._torch import hooks_of
from subclasses.layout import cotangent_layout
from tests.subclasses.subjects import LowRank, Scaled

aten = torch.ops.aten


class Quantized(TensorSubclass, size_from="q", dtype_from="scale", fallback="materialize", trainable=True):
    """Integers that stay, and a scale that is trained."""

    q: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()

    def materialize(self):
        return self.q.to(self.scale.dtype) * self.scale


class Ruled(TensorSubclass, trainable=True):
    """One rule above autograd and no fallback; its gradient is a cotangent without being converted."""

    data_: Tensor = inner()
    offset: Tensor | None = inner(optional=True)
    power: int = static(default=1)


@Ruled.implements(F.linear)
def _(func, x, w, bias=None):
    return func(x, w.unwrap("data_") ** w.power, bias)


class Pair(TensorSubclass, fallback="map"):
    """Each op runs on both."""

    a: Tensor = inner()
    b: Tensor = inner()


def randn(*size):
    return torch.randn(*size, dtype=torch.float64)


MAKERS = {
    "low rank": lambda: (LowRank, randn(4, 2), randn(2, 4)),
    "quantized": lambda: (Quantized, torch.randint(-8, 8, (4, 4), dtype=torch.int8), randn(4, 1)),
    "ruled": lambda: (Ruled, randn(4, 4)),
    "pair": lambda: (Pair, randn(4, 4), randn(4, 4)),
}


class Net(nn.Module):
    """A layer for each kind of weight: Parameters of the classes, or their inner tensors as parameters."""

    def __init__(self, weights, wraps):
        super().__init__()
        self.classes = [cls for cls, *_ in weights]
        self.wraps, self.plain = wraps, nn.Linear(4, 4, dtype=torch.float64)
        self.weights, self.integers = nn.ParameterList(), {}
        for i, (cls, *inners) in enumerate(weights):
            own = [t.clone() for t in inners]
            values = [cls(*own)] if wraps else own
            self.integers[i] = [t for t in own if not t.is_floating_point()]
            self.weights.extend(nn.Parameter(v) for v in values if v.is_floating_point())

    def forward(self, x):
        rest = iter(self.weights)
        x = self.plain(x)
        for i, cls in enumerate(self.classes):
            count = 2 if cls in (LowRank, Pair) and not self.wraps else 1
            found = [next(rest) for _ in range(count)]
            w = found[0] if self.wraps else cls(*self.integers[i], *found)
            if cls is Pair:  # with a plain operand, its op would give that a Pair as gradient
                a, b = (w * 2).unwrap()
                x = x + F.linear(x, a - b).tanh()
            else:
                x = x + F.linear(x, w).tanh()
        return x.square().mean()

    def inners(self):
        found = [
            t
            for w in self.weights
            for t in (w.detach().unwrap() if isinstance(w, TensorSubclass) else (w.detach(),))
        ]
        return [t for t in found if t is not None and t.is_floating_point()]


def make_nets(kinds):
    weights = [MAKERS[k]() for k in kinds]
    wrapped, plain = Net(weights, True), Net(weights, False)
    plain.plain.load_state_dict(wrapped.plain.state_dict())
    return wrapped, plain


def check_same(wrapped, plain):
    torch.testing.assert_close(wrapped.inners(), plain.inners(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(wrapped.plain.state_dict(), plain.plain.state_dict(), rtol=1e-9, atol=1e-12)


def train(net, optimizer, steps=3, run=None, clip=None):
    run = net if run is None else run
    for i in range(steps):
        for j in range(2):  # gradients accumulate
            run(torch.arange(8, dtype=torch.float64).view(2, 4) / (i + j + 1)).backward()
        if clip is not None:
            clip(net)
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)


KINDS = [*([k] for k in MAKERS), list(MAKERS), [*MAKERS, "low rank"]]
IDS = [" ".join(k) for k in KINDS]

OPTIMIZERS = {
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=0.1, **how),
    "SGD with momentum": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
    "SGD with Nesterov": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **how),
    "Adam": lambda p, **how: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **how),
    "AMSGrad": lambda p, **how: torch.optim.Adam(p, lr=0.1, amsgrad=True, **how),
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, **how),
    "Adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, **how),
}
MORE_OPTIMIZERS = {
    "RMSprop": lambda p, **how: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, **how),
    "Adadelta": lambda p, **how: torch.optim.Adadelta(p, lr=0.1, **how),
    "Adamax": lambda p, **how: torch.optim.Adamax(p, lr=0.1, **how),
    "NAdam": lambda p, **how: torch.optim.NAdam(p, lr=0.1, **how),
    "RAdam": lambda p, **how: torch.optim.RAdam(p, lr=0.1, **how),
    "ASGD": lambda p, **how: torch.optim.ASGD(p, lr=0.1, **how),
}


def check_training(kinds, optimizer, clip=None, compile_=None):
    nets = make_nets(kinds)
    for net in nets:
        run = compile_(net) if compile_ and net is nets[0] else None
        train(net, optimizer([p for p in net.parameters() if p.requires_grad]), run=run, clip=clip)
    check_same(*nets)


# ---- optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.sweep(8)
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_an_optimizer_updates_the_inner_tensors_as_parameters(kinds, name, how):
    check_training(kinds, lambda p: OPTIMIZERS[name](p, **how))


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
def test_more_optimizers(name, foreach):
    check_training(list(MAKERS), lambda p: MORE_OPTIMIZERS[name](p, foreach=foreach))


def params(net):
    return [p for p in net.parameters() if p.requires_grad]


CLIPS = {
    "norm": lambda net: nn.utils.clip_grad_norm_(params(net), 0.05),
    "norm of order 1": lambda net: nn.utils.clip_grad_norm_(params(net), 0.05, norm_type=1),
    "largest": lambda net: nn.utils.clip_grad_norm_(params(net), 0.05, norm_type=float("inf")),
    "norm, foreach": lambda net: nn.utils.clip_grad_norm_(params(net), 0.05, foreach=True),
    "value": lambda net: nn.utils.clip_grad_value_(params(net), 0.01),
    "value, foreach": lambda net: nn.utils.clip_grad_value_(params(net), 0.01, foreach=True),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_clipping(kinds, clip):
    wrapped, plain = make_nets(kinds)
    x = randn(2, 4)
    for net in (wrapped, plain):
        net(x).backward()
    torch.testing.assert_close(CLIPS[clip](wrapped), CLIPS[clip](plain))
    check_training(kinds, OPTIMIZERS["SGD"], clip=CLIPS[clip])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("function", [torch.linalg.vector_norm, torch.norm, aten.linalg_vector_norm.default])
def test_clipping_does_not_ask_the_rule_for_the_norm_of_values(function, foreach):
    class Normed(LowRank, trainable=True):
        pass

    @Normed.implements(function)
    def _(func, x, *args, **kwargs):
        return func(x.left @ x.right, *args, **kwargs)

    w = nn.Parameter(Normed(randn(4, 2), randn(2, 4)))
    parts = [nn.Parameter(t.detach().clone()) for t in (w.left, w.right)]
    F.linear(randn(2, 4).fill_(0.5), w).sum().backward()
    F.linear(randn(2, 4).fill_(0.5), parts[0] @ parts[1]).sum().backward()
    norms = [nn.utils.clip_grad_norm_(p, 0.05, foreach=foreach) for p in ([w], parts)]
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(w.grad.left, parts[0].grad)
    value = torch.linalg.vector_norm(w) if function is not torch.norm else torch.norm(w)
    torch.testing.assert_close(value, torch.linalg.vector_norm(parts[0] @ parts[1]))


@pytest.mark.parametrize("foreach", [False, True])
def test_a_class_may_say_what_the_norm_of_a_gradient_is(foreach):
    class Refusing(LowRank, trainable=True):
        pass

    class Heir(Refusing):
        pass

    @Refusing.Cotangent.implements(torch.linalg.vector_norm, torch._foreach_norm)
    def _(func, *args, **kwargs):
        raise DispatchError("no norm")

    for cls in (Refusing, Heir):
        w = nn.Parameter(cls(randn(4, 2), randn(2, 4)))
        F.linear(randn(2, 4), w).sum().backward()
        with pytest.raises(DispatchError, match="no norm"):
            nn.utils.clip_grad_norm_([w], 0.05, foreach=foreach)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_a_gradient_scaler(kinds, fused):
    nets = make_nets(kinds)
    for net in nets:
        optimizer = torch.optim.AdamW(params(net), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for scale in (1, float("inf"), 1):  # the step with infinite gradients is skipped
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(2, 4, dtype=torch.float64)) * scale).backward()
            if not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params(net), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4
    check_same(*nets)


AVERAGES = {"ema": get_ema_multi_avg_fn(0.9), "swa": get_swa_multi_avg_fn()}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_averages_of_models(kinds, average):
    check_averages(kinds, multi_avg_fn=AVERAGES[average])


@pytest.mark.parametrize("average", [get_ema_avg_fn(0.9), None], ids=["ema", "default"])
def test_averages_of_models_one_by_one(average):
    check_averages(["pair"], avg_fn=average)


def check_averages(kinds, **how):
    nets, averages = make_nets(kinds), []
    for net in nets:
        optimizer = torch.optim.SGD(params(net), lr=0.5)
        averages.append(AveragedModel(net, **how))
        for _ in range(3):
            train(net, optimizer, 1)
            averages[-1].update_parameters(net)
    check_same(*(a.module for a in averages))
    assert averages[0].module(randn(2, 4)).requires_grad


def test_an_average_that_is_written_by_hand():
    nets = make_nets(["low rank", "ruled"])
    states = []
    for net in nets:
        state = {k: v.clone() for k, v in net.state_dict().items()}
        train(net, torch.optim.SGD(params(net), lr=0.5))
        for k, v in net.state_dict().items():
            state[k].mul_(0.9).add_(v, alpha=0.1)
        net.load_state_dict(state)
        states.append(state)
    check_same(*nets)


@pytest.mark.parametrize("average", [get_ema_avg_fn(0.9), None], ids=["ema", "default"])
def test_an_average_of_values_is_refused(average):
    """0.9 * W + 0.1 * V is the mean of the matrices, and has another rank."""
    net = Net([MAKERS["low rank"]()], True)
    model = AveragedModel(net, avg_fn=average)
    model.update_parameters(net)
    before = model.module.inners()
    with pytest.raises(DispatchError, match="pass multi_avg_fn=get_ema"):
        model.update_parameters(net)
    torch.testing.assert_close(model.module.inners(), before, rtol=0, atol=0)


def test_a_schedule_and_states_that_are_saved_and_loaded():
    nets, states = make_nets(list(MAKERS)), {}
    for net in nets:
        for _ in range(2):
            optimizer = torch.optim.AdamW(params(net), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            if net in states:
                optimizer.load_state_dict(torch.load(_saved(states[net]), weights_only=True))
            train(net, optimizer, 2)
            schedule.step()
            states[net] = optimizer.state_dict()
    check_same(*nets)
    state = states[nets[0]]["state"][2]  # after the two of the plain layer
    assert type(state["exp_avg"]) is LowRank.Cotangent


COMPILERS = {
    "stock": lambda net: torch.compile(net, backend="aot_eager"),
    "desugar": lambda net: desugar.compile(net, backend="eager"),
    "desugar's backend": lambda net: torch.compile(net, backend="desugar", options={"backend": "eager"}),
}


@pytest.mark.sweep(24)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_a_compiled_forward(kinds, compiler):
    check_training(kinds, OPTIMIZERS["AdamW"], clip=CLIPS["norm"], compile_=COMPILERS[compiler])


# ---- the gradient --------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


def make_parameter(kind="low rank", **how):
    cls, *inners = MAKERS[kind]()
    return nn.Parameter(cls(*inners), **how)


def check_gradient(p):
    """A gradient through an op that materializes is a cotangent: that of each factor."""
    p.grad = None
    F.linear(X.to(p.dtype), p).sum().backward()
    left, right = (t.clone().requires_grad_() for t in (p.left, p.right))
    F.linear(X.to(p.dtype), left @ right).sum().backward()
    assert type(p.grad) is LowRank.Cotangent and p.grad._layout is cotangent_layout(p._layout)
    torch.testing.assert_close([p.grad.left, p.grad.right], [left.grad, right.grad])


COPIES = {
    "itself": lambda p: p,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "a parameter of its data": lambda p: nn.Parameter(p.data),
    "frozen and thawed": lambda p: p.requires_grad_(False).requires_grad_(),
    "thawed": lambda p: nn.Parameter(p.detach(), requires_grad=False).requires_grad_(),
    "a frozen copy, thawed": lambda p: copy.deepcopy(p.requires_grad_(False)).requires_grad_(),
    "file": lambda p: torch.load(_saved(p), weights_only=True),
}


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_converts_its_gradients(way):
    p = COPIES[way](make_parameter())
    assert isinstance(p, nn.Parameter) and len(hooks_of(p)) == 1
    check_gradient(p)
    p.grad = None
    F.linear(X, p).sum().backward()
    p.unwrap("left").sum().backward()  # a cotangent is added to what was a plain gradient
    F.linear(X, p).sum().backward()
    torch.testing.assert_close(p.grad.left, 2 * (X @ p.right.T).sum(0).expand(4, 2) + 1)


def test_a_module_that_is_moved_and_loaded():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = make_parameter()

    module = Module()
    before = module.w
    module.to(torch.float32)
    assert module.w is before and module.w.dtype == torch.float32
    check_gradient(module.w)
    seen = []
    module.w.register_hook(lambda grad: seen.append(type(grad)))  # in the same list of hooks
    check_gradient(module.w)
    assert seen == [LowRank.Cotangent]
    other = Module().to(torch.float32)
    for assign in (False, True):
        other.load_state_dict(module.state_dict(), assign=assign)
        assert torch.equal(other.w.left, module.w.left) and isinstance(other.w, nn.Parameter)
        check_gradient(other.w)
    check_gradient(copy.deepcopy(module).w)


def test_a_module_that_is_frozen_emptied_and_called_with_other_weights():
    layer = nn.Linear(4, 4, dtype=torch.float64)
    layer.weight = make_parameter()
    layer.requires_grad_(False).requires_grad_()
    check_gradient(layer.weight)
    other = {"weight": layer.weight.detach().clone().requires_grad_()}
    torch.testing.assert_close(torch.func.functional_call(layer, other, (X,)), layer(X))
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, nn.Parameter) and not layer.weight._layout.cotangent
    layer.load_state_dict({"weight": make_parameter().detach(), "bias": layer.bias.detach()})
    check_gradient(layer.weight)


def test_the_attributes_of_a_parameter_are_not_kept_by_a_cycle():
    import gc
    import weakref

    p = make_parameter()
    held = weakref.ref(p.left)
    gc.disable()
    try:
        check_gradient(p)
        del p
        assert held() is None
    finally:
        gc.enable()


def test_a_gradient_of_a_gradient_is_that_of_the_value():
    p = make_parameter()
    (grad,) = torch.autograd.grad((p * p).sum(), p, create_graph=True)
    assert type(grad) is Tensor
    (grad * grad).sum().backward()
    left, right = (t.clone().requires_grad_() for t in (p.left, p.right))
    (4 * (left @ right) ** 2).sum().backward()
    torch.testing.assert_close([p.grad.left, p.grad.right], [left.grad, right.grad])


def test_an_assigned_inner_tensor_is_what_gradients_are_pulled_back_through():
    p = make_parameter()
    p.right = randn(2, 4)
    check_gradient(p)


# ---- what is arithmetic of inner tensors, and what is not ----------------------------------------------------


def test_values_keep_their_meaning():
    w = LowRank(randn(4, 2), randn(2, 4))
    torch.testing.assert_close(w * 2, w.materialize() * 2)
    torch.testing.assert_close(nn.Parameter(w) * 2, w.materialize() * 2)
    with pytest.raises(DispatchError, match="writes to a LowRank"):
        w.mul_(2)
    with pytest.raises(DispatchError, match="writes to a LowRank"):
        torch._foreach_mul_([w], 2)
    (plain,) = torch._foreach_mul([w], 2)
    torch.testing.assert_close(plain, w.materialize() * 2)
    assert type(torch.zeros_like(w)) is Tensor


def test_points_and_cotangents():
    p = make_parameter()
    check_gradient(p)
    g = p.grad
    with torch.no_grad():
        moved, tangent = p - g * 0.1, g + p
        torch.testing.assert_close(moved.left, p.left - g.left * 0.1)
        assert not moved._layout.cotangent and tangent._layout.cotangent
        (listed,) = aten._foreach_sub.List(
            [p], [g]
        )  # torch's parser of arguments takes [g] for a list of numbers
        assert not listed._layout.cotangent
        assert torch.zeros_like(p)._layout.cotangent and (g > 0).left.dtype == torch.bool
        masked = torch.where(g.isnan(), torch.zeros_like(g), g)
        torch.testing.assert_close(masked.left, g.left)
        p.detach().clone().mul_(2)
        p.copy_(moved)
    torch.testing.assert_close(p.left, moved.left)
    norms = torch.linalg.vector_norm(torch.stack([g.left.norm(), g.right.norm()]))
    torch.testing.assert_close(g.norm(), norms)
    for call in (
        lambda: g * randn(4, 4),
        lambda: g + LowRank(g.left, g.right),
        lambda: torch._foreach_mul([g], [X]),
    ):
        with pytest.raises(
            DispatchError, match=r"cotangents of a LowRank are added|Cotangent beside a LowRank"
        ):
            call()


def test_what_autograd_records_is_not_arithmetic_of_points():
    p, factor = make_parameter(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for call in (lambda: p.detach().mul_(factor), lambda: p.clone().mul_(2)):
        with pytest.raises(DispatchError, match="writes to a LowRank"):
            call()


def test_a_later_write_is_noticed():
    p = make_parameter()
    out = (p.unwrap("left") ** 2).sum()
    with torch.no_grad():
        torch._foreach_mul_([p], 2)
    with pytest.raises(RuntimeError, match="modified in"):
        out.backward()


def test_lists_with_lists_of_numbers():
    ps = [make_parameter(), nn.Parameter(randn(3)), make_parameter("pair"), make_parameter("ruled")]
    firsts = [
        p.detach().unwrap()[0].clone() if isinstance(p, TensorSubclass) else p.detach().clone() for p in ps
    ]
    scalars = [1.0, 2.0, 3.0, 4.0]
    with torch.no_grad():
        torch._foreach_mul_(ps, scalars)
        ones = [torch.ones_like(p) for p in ps]
        torch._foreach_addcmul_(ps, ones, ones, torch.tensor(scalars, dtype=torch.float64))
        torch._foreach_copy_(ps, [p.detach().clone() for p in ps])
    for p, first, s in zip(ps, firsts, scalars, strict=True):
        got = p.detach().unwrap()[0] if isinstance(p, TensorSubclass) else p.detach()
        torch.testing.assert_close(got, first * s + s)


# ---- declared and refused ------------------------------------------------------------------------------------


def test_the_keyword_is_inherited_and_checked():
    class Child(LowRank):
        pass

    class Frozen(LowRank, trainable=False):
        pass

    assert Child.__spec__.trainable and not Frozen.__spec__.trainable and Pair.__spec__.trainable
    assert "trainable=True" in repr(Child.__spec__)
    with pytest.raises(DispatchError, match="trainable=True"):
        step_of(nn.Parameter(Frozen(randn(4, 2), randn(2, 4))))
    with pytest.raises(SpecError, match=r"torch\.int8; remove trainable=True"):

        class Integers(TensorSubclass, trainable=True):
            q: Tensor = inner(dtype=torch.int8)

    with pytest.raises(SpecError, match="a bool as trainable="):

        class Odd(TensorSubclass, trainable="yes"):
            q: Tensor = inner()


def step_of(p):
    p.grad = torch.ones(p.shape, dtype=p.dtype)
    torch.optim.SGD([p], lr=0.1).step()


@pytest.mark.sweep(9)
@pytest.mark.parametrize("optimizer", ["SGD with momentum", "AdamW"])
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_with_a_parameter_that_cannot_be_updated_writes_nothing(optimizer, how, compiled):
    """Making the Parameter, and its gradient, is no fault. No plain Parameter beside it is updated."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = nn.Parameter(Scaled(torch.ones(3, 3), torch.tensor(2.0)))
    layers[1].weight = weight
    layers(torch.ones(2, 3)).sum().backward()
    assert weight.requires_grad and type(weight.grad) is Tensor and weight.grad.shape == (3, 3)
    before = [t.clone() for t in (*layers[0].parameters(), weight.data_, weight.factor)]
    state = OPTIMIZERS[optimizer](layers.parameters(), **how)
    step = torch.compile(state.step, backend="eager") if compiled else state.step
    with pytest.raises(
        DispatchError, match=r"step\(\): a Parameter is a Scaled.* requires_grad_\(False\).*call Scaled"
    ):
        step()
    assert not state.state
    for t, old in zip((*layers[0].parameters(), weight.data_, weight.factor), before, strict=True):
        assert torch.equal(t, old)
    layers.requires_grad_(False)[0].requires_grad_()
    weight.grad = None
    step()
    assert not torch.equal(layers[0].weight, before[0])


def test_a_class_that_cannot_train_may_be_a_parameter():
    frozen = nn.Parameter(Scaled(torch.ones(3), torch.tensor(2.0)), requires_grad=False)
    layer = nn.Linear(3, 1)
    layer.weight = frozen
    layer.register_parameter("other", frozen)
    assert copy.deepcopy(layer).to(torch.float64).weight.dtype == torch.float64
    assert (
        layer.requires_grad_().weight.requires_grad and not layer.requires_grad_(False).weight.requires_grad
    )


def test_frozen_weights_are_loaded_into_a_module_that_trains():
    layer = nn.Linear(3, 3)
    layer.load_state_dict(
        {"weight": Scaled(torch.ones(3, 3), torch.tensor(2.0)), "bias": torch.zeros(3)}, assign=True
    )
    assert type(layer.weight) is Scaled and isinstance(layer.weight, nn.Parameter)
    assert copy.deepcopy(layer).to(torch.float64).half().weight.dtype == torch.float16
    layer.to("cpu")
    torch.testing.assert_close(layer(torch.ones(1, 3)), torch.full((1, 3), 6.0))
    layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(DispatchError, match=r"SGD.step\(\): a Parameter is a Scaled"):
        torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_a_leaf_that_is_no_parameter_is_refused_by_the_op():
    x = Scaled(torch.ones(3), torch.tensor(2.0)).requires_grad_()
    with torch.no_grad(), pytest.raises(DispatchError, match="writes to a Scaled"):
        x.add_(torch.ones(3))


def test_a_rule_for_values_is_not_enough():
    """What an optimizer adds is a gradient, whose inner tensors are derivatives."""

    class Added(TensorSubclass):
        a: Tensor = inner()

    Added.implements(aten.add.Tensor)(
        lambda func, x, y, **kwargs: Added(func(x.a, y.a if isinstance(y, Added) else y, **kwargs))
    )
    with pytest.raises(DispatchError, match=r"its rule is for values, not for a gradient.*trainable=True"):
        step_of(nn.Parameter(Added(torch.ones(2))))


def test_an_op_that_optimizers_write_by_names_what_lets_them():
    class Added(TensorSubclass, fallback="views"):
        a: Tensor = inner()

    Added.implements(arithmetic)(lambda func, x, y: Added(func(x.a, y.a if isinstance(y, Added) else y)))
    with pytest.raises(
        DispatchError, match=r"lerp_.*updates each inner tensor of a class declared with trainable=True"
    ):
        Added(torch.ones(2)).lerp_(Added(torch.zeros(2)), 0.5)


def test_lists_of_a_class_with_a_rule_above_autograd():
    class Ruled(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    Ruled.implements(F.linear)(lambda func, *args, **kwargs: Ruled.unruled(func, *args, **kwargs))
    one, other = Ruled(torch.ones(2, 3)), Ruled(torch.full((2, 3), 4.0))
    for result, expected in (
        (torch._foreach_add([one, other], [other, one]), [5.0, 5.0]),
        (torch._foreach_mul([one, other], [other, other]), [4.0, 16.0]),
        (torch._foreach_add([one, other], [other, one], alpha=2), [9.0, 6.0]),
        (torch._foreach_mul([one, other], 2), [2.0, 8.0]),
    ):
        assert [type(r) for r in result] == [Ruled, Ruled]
        assert [r.held.unique().tolist() for r in result] == [[number] for number in expected]


def test_a_number_is_added_to_a_gradient():
    p = torch.nn.Parameter(LowRank(torch.ones(2, 1), torch.ones(1, 2)))
    (torch.ones(3, 2) @ p).sum().backward()
    for shifted in (p.grad + 1, 1 + p.grad, p.grad.add(1), p.grad - (-1)):
        assert torch.equal(shifted.left, p.grad.left + 1) and torch.equal(shifted.right, p.grad.right + 1)


STEPS = {
    "loop": lambda p: torch.optim.SGD([p], lr=0.5, foreach=False).step(),
    "foreach": lambda p: torch.optim.SGD([p], lr=0.5, foreach=True).step(),
    "adamw, foreach": lambda p: torch.optim.AdamW([p], lr=0.5, foreach=True).step(),
    "adamw, fused": lambda p: torch.optim.AdamW([p], lr=0.5, fused=True).step(),
    "by hand": lambda p: p.detach().mul_(2),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["low rank", "mapped"])
def test_a_step_between_forward_and_backward_is_noticed(kind, step, compiled):
    """A list op leaves the versions of its wrappers to its plan."""
    torch.compiler.reset()
    x = torch.randn(3, 4, requires_grad=True)
    if kind == "mapped":
        parameter, loss = nn.Parameter(Pair(torch.randn(4), torch.randn(4))), lambda: parameter * parameter
    else:
        parameter = nn.Parameter(LowRank(torch.randn(4, 2), torch.randn(2, 4)))
        loss = lambda: F.linear(x, parameter).square()  # noqa: E731
    call = desugar.compile(loss, backend="eager") if compiled else loss

    def total():
        out = call()
        return (out.unwrap("a") if kind == "mapped" else out).sum()

    total().backward()
    late = total()
    with torch.no_grad():
        STEPS[step](parameter)
    with pytest.raises(RuntimeError, match="modified"):
        late.backward()


# ---- a cotangent is no matrix ------------------------------------------------------------------------------


class Factors(LowRank):
    """Has a rule for products with it."""


@Factors.implements(torch.matmul)
def _(func, x, w):
    left, right = w.unwrap()
    return (x @ left) @ right


STATES = {
    "ones_like": torch.ones_like,
    "full_like": lambda p: p * torch.full_like(p, 2.0),
    "zeros_like": lambda p: torch.zeros_like(p) + 1,
}


@pytest.mark.parametrize(
    "way", [lambda f: f, lambda f: desugar.compile(f, backend="eager")], ids=["eager", "desugar"]
)
@pytest.mark.parametrize("state", STATES)
def test_a_state_of_an_optimizer_is_no_factor_of_a_product(state, way):
    p = nn.Parameter(Factors(torch.randn(3, 2), torch.randn(2, 3)))
    with pytest.raises(
        Exception,
        match=r"mm.default on a cotangent of Factors.*call it on p\.materialize\(\)|on a Factors\.Cotangent: PyTorch's",
    ):
        way(lambda p: torch.ones(1, 3) @ STATES[state](p))(p)
    got = way(lambda p: torch.ones(1, 3) @ torch.ones_like(p.materialize()))(p)
    torch.testing.assert_close(got, torch.full((1, 3), 3.0))
